"""Reliability diagram of predicted acceptance probabilities."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_BINS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Outcomes by scope and by predicted probability, in NUM_BINS equal bins.

    A drafted token counts if all tokens before it in its draft were correct, whether it was
    submitted for verification or not. It is compared with the tokens that were generated.
    """

    tried: NDArray[np.int64]
    """[scopes, bins]"""
    accepted: NDArray[np.int64]
    predicted: NDArray[np.float64]
    """Sum of the predicted probabilities; divided by `tried`, the mean prediction of the bin."""

    def error(self) -> float:
        """Expected calibration error over all drafted tokens."""
        tried = self.tried.sum(axis=0)
        apart = np.abs(self.predicted.sum(axis=0) - self.accepted.sum(axis=0))
        return float(apart.sum() / max(int(tried.sum()), 1))
