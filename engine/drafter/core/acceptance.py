"""Acceptance rates of a drafter's tokens by position in the draft.

A rate is conditional: the probability that a token is accepted given that all before it were, since
only then is it verified. Counts decay with every step that drafts. A position that no draft has
reached is assumed to have the rate of the last one reached.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

STEP_DECAY: Final = 0.99
"""Decay of a step's weight per later step."""
PRIOR_RATE: Final = 0.5
PRIOR_WEIGHT: Final = 4.0
"""Weight of the prior, in drafted tokens."""
WEIGHTS_CHANGED_DECAY: Final = 0.05


class Acceptance:
    """Decayed counts of tried and accepted tokens per draft position."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._num_tried = np.zeros(max_draft_tokens)
        self._num_accepted = np.zeros(max_draft_tokens)

    def step(self) -> None:
        self._num_tried *= STEP_DECAY
        self._num_accepted *= STEP_DECAY

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Record one draft. Tokens after the first rejected one are not observed."""
        self._num_tried[: min(num_accepted + 1, num_drafted)] += 1
        self._num_accepted[:num_accepted] += 1

    def weights_changed(self) -> None:
        """Reduce what was observed under other weights to a weak prior."""
        self._num_tried *= WEIGHTS_CHANGED_DECAY
        self._num_accepted *= WEIGHTS_CHANGED_DECAY

    def probabilities(self) -> NDArray[np.float32]:
        """[longest]: conditional acceptance probability per draft position."""
        rates = np.empty(len(self._num_tried), np.float32)
        prior = PRIOR_RATE
        for position, num_tried in enumerate(self._num_tried):
            prior = (self._num_accepted[position] + PRIOR_WEIGHT * prior) / (
                num_tried + PRIOR_WEIGHT
            )
            rates[position] = prior
        return rates
