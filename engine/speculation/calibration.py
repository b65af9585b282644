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

CLASSES = np.array([0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95])
SURE = 1.0
"""So many standard deviations below what came."""
REMEMBERED = 512.0
"""A class that has seen so many tokens forgets half of them."""
YOUNG = 64.0
"""While fewer tokens were seen in all, it is worth looking at every step."""


class Trust:
    def __init__(self) -> None:
        self._seen, self._promised, self._came = np.zeros((3, len(CLASSES) + 1))
        self._kept = np.zeros(len(CLASSES) + 1)
        self._num_seen = 0.0

    @property
    def is_young(self) -> bool:
        return self._num_seen < YOUNG

    def worth(self, promised: Floats) -> Floats:
        """What is believed of it."""
        believed = promised * self._kept[np.searchsorted(CLASSES, promised)]
        return np.minimum(believed, 1.0)

    def learn(self, promised: Floats, came: NDArray[np.bool_]) -> None:
        """Of tokens whose fate is known: whether they came, all before them having come."""
        kind, kinds = np.searchsorted(CLASSES, promised), len(CLASSES) + 1
        self._num_seen += len(promised)
        self._seen += np.bincount(kind, minlength=kinds)
        self._promised += np.bincount(kind, promised, kinds)
        self._came += np.bincount(kind, came, kinds)
        full = self._seen > REMEMBERED
        for counted in (self._seen, self._promised, self._came):
            counted[full] /= 2
        rate = (self._came + 1) / (self._seen + 2)
        least = self._came - SURE * np.sqrt(self._seen * rate * (1 - rate))
        self._kept = np.maximum(least, 0.0) / np.maximum(self._promised, 1e-9)
