"""Controller for a single draft length per step, limited to lengths with CUDA graphs."""

from collections.abc import Mapping

import numpy as np

from engine.speculation.calibration import DraftCalibration
from engine.speculation.controller import Controller, DraftTokens
from engine.speculation.cost import StepCostModel
from kernels.draft_index.store_protocol import Int32Array


def longest_length(max_samples: Mapping[int, int], running: int, limit: int) -> int:
    """Longest draft length up to `limit` that `running` rows may use, or zero."""
    return max((n for n, most in max_samples.items() if n <= limit and running <= most), default=0)


class UniformController(Controller):
    """Controller that sends the same number of tokens for every row.

    Rows whose drafts are shorter are verified with tokens that are not drafts. `max_samples` maps
    each length to the number of rows that may use it.
    """

    def __init__(
        self, max_samples: Mapping[int, int], cost: StepCostModel, calibration: DraftCalibration
    ) -> None:
        super().__init__(cost, calibration)
        self._max_samples = max_samples

    def _best_lengths(
        self, tokens: DraftTokens, num_rows: int, *, running: int, context: int
    ) -> Int32Array:
        allowed = sorted(n for n, most in self._max_samples.items() if n and running <= most)
        lengths = np.array([0, *allowed])
        gains = np.bincount(tokens.positions, tokens.gains, minlength=int(lengths.max()))
        emitted = running + np.concatenate(([0.0], np.cumsum(gains)))[lengths]
        verified = running + num_rows * lengths
        seconds = self.cost.seconds(running=running, context=context, verified=verified)
        best = int(lengths[self._best_rate(emitted / seconds)])
        return np.full(num_rows, best, np.int32)
