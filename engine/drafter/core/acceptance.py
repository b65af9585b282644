"""How likely a drafter's tokens are to be accepted, by their place in a draft.

What counts is the probability that a token is accepted, those before it having been: only then is
it looked at. A step counts for less with every one that drafts after it. Places that no draft has
reached are taken to do as well as the last one that was.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

KEPT: Final = 0.99
"""What is left of a step's weight one step later."""
GUESSED: Final = 0.5
WEIGHT: Final = 4.0
"""Of what is taken for granted, in drafted tokens."""
STALE: Final = 0.05


class Acceptance:
    def __init__(self, longest: int) -> None:
        self._tried = np.zeros(longest)
        self._accepted = np.zeros(longest)

    def step(self) -> None:
        self._tried *= KEPT
        self._accepted *= KEPT

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """One draft. The first token that is refused ends what is learned of it."""
        self._tried[: min(num_accepted + 1, num_drafted)] += 1
        self._accepted[:num_accepted] += 1

    def weights_changed(self) -> None:
        """What is known was said of other weights; it is a guess at these."""
        self._tried *= STALE
        self._accepted *= STALE

    def probabilities(self) -> NDArray[np.float32]:
        """[longest]"""
        found = np.empty(len(self._tried), np.float32)
        before = GUESSED
        for place, tried in enumerate(self._tried):
            before = (self._accepted[place] + WEIGHT * before) / (tried + WEIGHT)
            found[place] = before
        return found
