"""The course of a loss: what it is of late, and whether that is news."""

from collections import deque
from statistics import fmean
from typing import Final

RECENT: Final = 0.02
LOOKED_BACK: Final = 500
COMPARED: Final = 100
"""Steps, the latest against the earliest of those that are looked back on."""
CHANGED: Final = 0.05
"""By how much of itself it differs where there is much to learn: it has risen with other weights,
or falls."""


class Course:
    """`late` is the mean of the last 50 steps, or of fewer so far."""

    def __init__(self, *, num_steps: int = 0, late: float = 0.0) -> None:
        self.num_steps = num_steps
        self.late = late
        self._losses: deque[float] = deque(maxlen=LOOKED_BACK)

    def observed(self, loss: float) -> None:
        self.num_steps += 1
        self.late += max(RECENT, 1 / self.num_steps) * (loss - self.late)
        self._losses.append(loss)

    @property
    def is_settled(self) -> bool:
        """What is served has not changed, and what there was to learn of it is learned."""
        if len(self._losses) < LOOKED_BACK:
            return False
        losses = list(self._losses)
        before, now = fmean(losses[:COMPARED]), fmean(losses[-COMPARED:])
        return abs(now - before) <= CHANGED * before
