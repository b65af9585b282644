"""The course of a loss: what it is of late, and whether that is news."""

from collections import deque
from statistics import fmean
from typing import Final

SMOOTHING: Final = 0.02
WINDOW_STEPS: Final = 500
COMPARED_STEPS: Final = 100
"""Steps, the latest against the earliest of those that are looked back on."""
MIN_RELATIVE_CHANGE: Final = 0.05
"""By how much of itself it differs where there is much to learn: it has risen with other weights,
or falls."""


class LossTracker:
    """`smoothed` is the mean of the last 50 steps, or of fewer so far."""

    def __init__(self, *, num_steps: int = 0, smoothed: float = 0.0) -> None:
        self.num_steps = num_steps
        self.smoothed = smoothed
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)

    def update(self, loss: float) -> None:
        self.num_steps += 1
        self.smoothed += max(SMOOTHING, 1 / self.num_steps) * (loss - self.smoothed)
        self._losses.append(loss)

    @property
    def has_converged(self) -> bool:
        """What is served has not changed, and what there was to learn of it is learned."""
        if len(self._losses) < WINDOW_STEPS:
            return False
        losses = list(self._losses)
        before, now = fmean(losses[:COMPARED_STEPS]), fmean(losses[-COMPARED_STEPS:])
        return abs(now - before) <= MIN_RELATIVE_CHANGE * before
