"""How far the probabilities that drafts came with were right."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """By scope and by the probability that was foretold, in NUM_BINS equal bins.

    A drafted token counts once all before it in its draft had come true, whether it was sent for
    verification or not: the tokens that finally came decide.
    """

    tried: NDArray[np.int64]
    """[scopes, bins]"""
    accepted: NDArray[np.int64]
    predicted: NDArray[np.float64]
    """The sum of the probabilities; divided by `tried`, where the bin really lies."""

    def error(self) -> float:
        """The mean distance of foretold and found, over all drafted tokens."""
        tried = self.tried.sum(axis=0)
        apart = np.abs(self.predicted.sum(axis=0) - self.accepted.sum(axis=0))
        return float(apart.sum() / max(int(tried.sum()), 1))
