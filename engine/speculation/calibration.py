"""How far what drafts promise is believed: as far as it was kept, and chance may have helped.

The draft store says of every token how likely it is to be accepted with all before it. That is a
mean, it begins with guesses, and whoever takes the best of many offers takes those that are too
good to be true. So tokens are sorted by what they promise, and in each class counted: what was
promised, and what came. Of the two the lower confidence bound of their ratio is what a token is
taken to be worth; nothing at first. A token that was not sent is counted as well, for a draft of
single tokens is right if they are what came: trust is earned without sending anything.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BIN_EDGES = np.array([0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95])
CONFIDENCE_SIGMAS = 1.0
"""So many standard deviations below what came."""
MAX_BIN_COUNT = 512.0
"""A class that has seen so many tokens forgets half of them."""
MIN_TOKENS_SEEN = 64.0
"""While fewer tokens were seen in all, it is worth looking at every step."""


class DraftCalibration:
    def __init__(self) -> None:
        self._seen, self._predicted, self._accepted = np.zeros((3, len(BIN_EDGES) + 1))
        self._ratio = np.zeros(len(BIN_EDGES) + 1)
        self._num_seen = 0.0

    @property
    def is_warming_up(self) -> bool:
        return self._num_seen < MIN_TOKENS_SEEN

    def expected(self, predicted: Floats) -> Floats:
        """What is believed of it."""
        calibrated = predicted * self._ratio[np.searchsorted(BIN_EDGES, predicted)]
        return np.minimum(calibrated, 1.0)

    def update(self, predicted: Floats, accepted: NDArray[np.bool_]) -> None:
        """Of tokens whose fate is known: whether they came, all before them having come."""
        bin_index, num_bins = np.searchsorted(BIN_EDGES, predicted), len(BIN_EDGES) + 1
        self._num_seen += len(predicted)
        self._seen += np.bincount(bin_index, minlength=num_bins)
        self._predicted += np.bincount(bin_index, predicted, num_bins)
        self._accepted += np.bincount(bin_index, accepted, num_bins)
        full = self._seen > MAX_BIN_COUNT
        for counted in (self._seen, self._predicted, self._accepted):
            counted[full] /= 2
        rate = (self._accepted + 1) / (self._seen + 2)
        least = self._accepted - CONFIDENCE_SIGMAS * np.sqrt(self._seen * rate * (1 - rate))
        self._ratio = np.maximum(least, 0.0) / np.maximum(self._predicted, 1e-9)
