"""How likely a drafter's tokens are to be accepted, by their place in a draft.

What counts is the probability that a token is accepted, those before it having been: only then is
it looked at. A step counts for less with every one that drafts after it. Places that no draft has
reached are taken to do as well as the last one that was.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

STEP_DECAY: Final = 0.99
"""What is left of a step's weight one step later."""
PRIOR_RATE: Final = 0.5
PRIOR_WEIGHT: Final = 4.0
"""Of what is taken for granted, in drafted tokens."""
WEIGHTS_CHANGED_DECAY: Final = 0.05


class Acceptance:
    def __init__(self, max_draft_tokens: int) -> None:
        self._num_tried = np.zeros(max_draft_tokens)
        self._num_accepted = np.zeros(max_draft_tokens)

    def step(self) -> None:
        self._num_tried *= STEP_DECAY
        self._num_accepted *= STEP_DECAY

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """One draft. The first token that is refused ends what is learned of it."""
        self._num_tried[: min(num_accepted + 1, num_drafted)] += 1
        self._num_accepted[:num_accepted] += 1

    def weights_changed(self) -> None:
        """What is known was said of other weights; it is a guess at these."""
        self._num_tried *= WEIGHTS_CHANGED_DECAY
        self._num_accepted *= WEIGHTS_CHANGED_DECAY

    def probabilities(self) -> NDArray[np.float32]:
        """[longest]"""
        rates = np.empty(len(self._num_tried), np.float32)
        prior = PRIOR_RATE
        for position, num_tried in enumerate(self._num_tried):
            prior = (self._num_accepted[position] + PRIOR_WEIGHT * prior) / (
                num_tried + PRIOR_WEIGHT
            )
            rates[position] = prior
        return rates
