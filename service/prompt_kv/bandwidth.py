"""Limits on prompt-KV downloads: total bandwidth, slow readers, fair turns between API keys."""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

BURST_SECONDS = 0.02
# Each send takes the GIL again from the event loop, so fewer sends delay requests less. A send ends
# earlier when the socket's buffer is full, by default after at most 4 MiB.
PIECE_BYTES = 4 * 2**20
PIECE_SECONDS = 0.1
MIN_PIECE_BYTES = 2**12


class RateLimiter:
    """Thread-safe limit on the bytes per second that all downloads together send.

    A thread calls `acquire` after it has sent bytes and sleeps until they are within the limit.
    With a limit of None it never sleeps.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._reserved_until = clock()
        # Smaller pieces at low rates bound the sleep after a piece to about PIECE_SECONDS.
        self.piece_bytes = PIECE_BYTES
        if bytes_per_second is not None:
            limit = int(bytes_per_second * PIECE_SECONDS)
            self.piece_bytes = min(PIECE_BYTES, max(MIN_PIECE_BYTES, limit))

    def acquire(self, num_bytes: int) -> None:
        if self._bytes_per_second is None:
            return
        with self._lock:
            now = self._clock()
            begin = max(self._reserved_until, now - BURST_SECONDS)
            self._reserved_until = begin + num_bytes / self._bytes_per_second
            wait = self._reserved_until - now
        if wait > 0:
            self._sleep(wait)


class ReaderRate:
    """Detects a slow reader of a download, by its rate while the server waits for the socket.

    Only these waits count, so waits for `RateLimiter` or for other readers do not make a reader
    slow. `is_too_slow` is set once the reader falls below the minimum rate over one window, that is
    over `window_seconds` of such waits.
    """

    def __init__(self, min_bytes_per_second: float, window_seconds: float) -> None:
        self._min_bytes = min_bytes_per_second * window_seconds
        self._window_seconds = window_seconds
        self._waited_seconds = 0.0
        self._sent_bytes = 0
        self.is_too_slow = False

    @property
    def seconds_left(self) -> float:
        """Rest of the measurement window, in seconds of waiting for a writable socket."""
        return self._window_seconds - self._waited_seconds

    def on_sent(self, num_bytes: int) -> None:
        self._sent_bytes += num_bytes

    def on_waited(self, seconds: float) -> None:
        self._waited_seconds += seconds
        if self._waited_seconds >= self._window_seconds:
            self.is_too_slow = self.is_too_slow or self._sent_bytes < self._min_bytes
            self._waited_seconds, self._sent_bytes = 0.0, 0


class Turns:
    """Semaphore with `num_turns` permits (turns) that are shared fairly between API keys.

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

    def _forget(self, key: str, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(key)
        if waiting is not None and turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._waiting[key]
