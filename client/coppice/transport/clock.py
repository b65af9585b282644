"""Time and chance, so that a test can hold both in its hands."""

from typing import Protocol


class Clock(Protocol):
    """Contract.

    now: seconds of a clock that never goes back.
    sleep: comes back that much later; over a blocking driver it does not suspend.
    random: evenly distributed from 0 up to 1.
    """

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    def random(self) -> float: ...
