"""Correction of predicted draft acceptance by the observed acceptance."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BIN_EDGES = np.array([0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95])
CONFIDENCE_SIGMAS = 1.0
"""Standard deviations between the observed acceptances and the lower confidence bound."""
MAX_BIN_COUNT = 512.0
"""A bin that exceeds this number of tokens has its counts halved."""
MIN_TOKENS_SEEN = 64.0
"""Draft tokens with known outcome after which the calibration has warmed up.

Until then every step is evaluated.
"""


class DraftCalibration:
    """Calibration of predicted draft acceptance against observed acceptance.

    The draft store yields, per token, a predicted probability that it and all tokens before it are
    accepted. The prediction is a mean that starts from priors, and choosing the best of many drafts
    adds a selection bias (winner's curse). Tokens are therefore binned by predicted probability,
    and each bin counts predicted and observed acceptances. A token's calibrated value is its
    prediction times the lower confidence bound of the bin's ratio of observed to predicted
    acceptances, which is zero at first.

    Draft tokens that were not sent are counted too: a draft names one token per position, so a
    token is correct exactly if the sampled token equals it. Calibration therefore warms up without
    sending anything.
    """

    def __init__(self) -> None:
        self._seen, self._predicted, self._accepted = np.zeros((3, len(BIN_EDGES) + 1))
        self._ratio = np.zeros(len(BIN_EDGES) + 1)
        self._num_seen = 0.0

    @property
    def is_warming_up(self) -> bool:
        return self._num_seen < MIN_TOKENS_SEEN

    def expected(self, predicted: Floats) -> Floats:
        """Calibrated acceptance probabilities of draft tokens, given their predicted ones."""
        calibrated = predicted * self._ratio[np.searchsorted(BIN_EDGES, predicted)]
        return np.minimum(calibrated, 1.0)

    def update(self, predicted: Floats, accepted: NDArray[np.bool_]) -> None:
        """Record draft tokens whose outcome is known, with their predicted probabilities.

        `accepted`: the token and all tokens before it in its draft were accepted.
        """
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
