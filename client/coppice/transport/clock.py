"""Clock and random number source, replaceable in tests."""

from typing import Protocol


class Clock(Protocol):
    """Protocol of clocks.

    now: monotonic time in seconds.
    sleep: waits; over a blocking driver it does not suspend.
    random: uniform in [0, 1).
    """

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    def random(self) -> float: ...
