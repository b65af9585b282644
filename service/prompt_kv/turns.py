"""Fair scheduling of a bounded number of threads between API keys."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Semaphore of `num_turns` that is fair between keys.

    A free turn goes to the waiting key that holds the fewest turns; ties are resolved round-robin.
    Not thread-safe: runs on one event loop.
    """

    def __init__(self, num_turns: int) -> None:
        self._num_free = num_turns
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        await self._take(key)
        try:
            yield
        finally:
            self._give_back(key)

    async def _take(self, key: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(key, turn)
            else:
                self._give_back(key)
            raise

    def _give_back(self, key: str) -> None:
        self._num_free += 1
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        self._hand_out()

    def _hand_out(self) -> None:
        while self._num_free and self._waiting:
            key = min(self._waiting, key=lambda waiting: self._held[waiting])
            waiting = self._waiting.pop(key)
            turn = waiting.popleft()
            if waiting:
                self._waiting[key] = waiting  # behind the other keys
            if not turn.done():
                self._num_free -= 1
                self._held[key] += 1
                turn.set_result(None)

    def _forget(self, key: str, clamp_seconds: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(key)
        if waiting is not None and clamp_seconds in waiting:
            waiting.remove(clamp_seconds)
            if not waiting:
                del self._waiting[key]
