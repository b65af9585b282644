"""Request priorities with ageing, so that no priority can starve another.

vLLM runs the request with the lowest priority number first and never changes that number, so a
group's age must be part of it from the start. It is the arrival time in microseconds plus a
handicap that depends on the priority and is always below a bound. A group of the lowest priority is
thus overtaken only by groups that arrive within that bound after it; later arrivals rank behind it.
"""

import time
from collections.abc import Callable

MICROSECONDS = 1_000_000


class PriorityAging:
    """Maps priorities to engine priorities when a group arrives.

    Its samples, and the paths that branch from them, share the result.
    """

    def __init__(
        self, *, overtaken_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._overtaken_seconds = overtaken_seconds
        self._clock = clock
        self._started_at = clock()

    def to_engine_priority(self, priority: int) -> int:
        """Engine priority; lower runs first.

        The resolution is finest near 0, where the values used in practice are.
        """
        fraction = 0.5 * (1 + priority / (1 + abs(priority)))
        handicap = self._overtaken_seconds * fraction
        return int((self._clock() - self._started_at + handicap) * MICROSECONDS)
