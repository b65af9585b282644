"""Cooperative scheduling of bulk work on the event loop, so that other requests can run."""

import asyncio
import time
from collections import deque

PER_TURN = 16
SLICE_SECONDS = 0.005


class Turns:
    """Rate limiter: lets at most `per_turn` waiters proceed per event loop iteration, in order."""

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
