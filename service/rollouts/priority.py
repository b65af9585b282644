"""One number for who is served first: a priority that cannot starve anybody.

vLLM serves the lowest number first and never changes it, so a group's age must be in it from the
beginning: its arrival, in microseconds, and a handicap for its priority that is always less than a
bound. A group of the least priority is thus overtaken only by groups that arrive within the bound
after it. Once it has waited so long, it outranks whatever comes.
"""

import time
from collections.abc import Callable

MICROSECONDS = 1_000_000


class PriorityAging:
    """Given out when a group arrives; its samples, and what grows from them, share its rank."""

    def __init__(
        self, *, overtaken_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._overtaken_seconds = overtaken_seconds
        self._clock = clock
        self._started_at = clock()

    def to_engine_priority(self, priority: int) -> int:
        """Lower is served first. Neighbouring priorities are far apart near 0, where people are."""
        fraction = 0.5 * (1 + priority / (1 + abs(priority)))
        handicap = self._overtaken_seconds * fraction
        return int((self._clock() - self._started_at + handicap) * MICROSECONDS)
