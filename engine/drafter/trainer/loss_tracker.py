"""Smoothed training loss and detection of convergence."""

from collections import deque
from statistics import fmean
from typing import Final

SMOOTHING: Final = 0.02
WINDOW_STEPS: Final = 500
COMPARED_STEPS: Final = 100
"""Steps at each end of the window whose mean losses are compared."""
MIN_RELATIVE_CHANGE: Final = 0.05
"""Relative change of the loss above which training has not converged.

The loss rises after a change of weights, and falls while there is more to learn.
"""


class LossTracker:
    """Losses of recent steps; `smoothed` is the mean of about the last 50, or of all so far."""

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
        """True if the loss neither rose (other weights) nor fell within the window."""
        if len(self._losses) < WINDOW_STEPS:
            return False
        losses = list(self._losses)
        before, now = fmean(losses[:COMPARED_STEPS]), fmean(losses[-COMPARED_STEPS:])
        return abs(now - before) <= MIN_RELATIVE_CHANGE * before
