"""Work on the event loop that is spread over its turns, so that other requests run in between."""

import asyncio
import time
from collections import deque

PER_TURN = 16
SLICE_SECONDS = 0.005


class Turns:
    """Lets at most `per_turn` pieces of work begin in one turn of the event loop, in order."""

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
            if not turn.done():  # its caller was cancelled
                turn.set_result(None)
                self._left -= 1
        self._scheduled = self._left < self._per_turn
        if self._scheduled:
            loop.call_soon(self._next, loop)


class TimeSlice:
    """One coroutine's loop: `pause` lets the event loop turn once the slice is used up."""

    def __init__(self, seconds: float = SLICE_SECONDS) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    async def pause(self) -> None:
        if time.monotonic() >= self._until:
            await asyncio.sleep(0)
            self._until = time.monotonic() + self._seconds
