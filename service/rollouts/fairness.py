"""Engine priorities that age, and time slices that keep the event loop responsive."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

MICROSECONDS = 1_000_000
PER_TURN = 16
SLICE_SECONDS = 0.005
OVERTAKEN_SECONDS: Final = 60.0
"""Time by which a group of the highest priority overtakes one of the lowest."""


class PriorityAging:
    """Conversion of request priorities to vLLM priorities with ageing, so that none is starved.

    vLLM runs the request with the lowest priority number first and never changes that number, so a
    group's age must be part of it from the start. The number is the arrival time in microseconds
    plus a handicap that depends on the requested priority and is always below a bound. A group of
    the lowest priority is thus overtaken only by groups that arrive within that bound after it;
    later arrivals rank behind it. All samples of a group and all paths of a tree have one number.
    """

    def __init__(
        self,
        *,
        overtaken_seconds: float = OVERTAKEN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._overtaken_seconds = overtaken_seconds
        self._clock = clock
        self._started_at = clock()

    def to_engine_priority(self, priority: int) -> int:
        """vLLM priority number of a request that arrives now; lower numbers run first.

        The resolution is finest near 0, where the values used in practice are.
        """
        fraction = 0.5 * (1 + priority / (1 + abs(priority)))
        handicap = self._overtaken_seconds * fraction
        return int((self._clock() - self._started_at + handicap) * MICROSECONDS)


class Turns:
    """Rate limiter: at most `per_turn` waiters proceed per event loop iteration, in FIFO order."""

    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._per_turn
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # false if its caller was cancelled
                turn.set_result(None)
                self._left -= 1
        self._scheduled = self._left < self._per_turn
        if self._scheduled:
            loop.call_soon(self._next, loop)


class TimeSlice:
    """Time budget of one coroutine; `pause` yields to the event loop once it is used up."""

    def __init__(self, seconds: float = SLICE_SECONDS) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    async def pause(self) -> None:
        if time.monotonic() >= self._until:
            await asyncio.sleep(0)
            self._until = time.monotonic() + self._seconds
