"""Bytes a second: the most of all threads that send, and the least of one reader."""

import threading
import time
from collections.abc import Callable

BURST_SECONDS = 0.02
PIECE_BYTES = 2**20
PIECE_SECONDS = 0.1
LEAST_PIECE_BYTES = 2**12


class RateLimiter:
    """Whoever has sent waits until the bytes before have had their time. No bound: nobody waits."""

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
        # A thread that has sent a piece sleeps for as long as the piece is worth.
        self.piece_bytes = PIECE_BYTES
        if bytes_per_second is not None:
            worth = int(bytes_per_second * PIECE_SECONDS)
            self.piece_bytes = min(PIECE_BYTES, max(LEAST_PIECE_BYTES, worth))

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
    """Bytes that one reader takes in the time that it is waited for.

    Only that time counts, so that neither `RateLimiter` nor other readers make a reader slow. Once
    it has taken less than the rate over a window, it is `too_slow`.
    """

    def __init__(self, min_bytes_per_second: float, window_seconds: float) -> None:
        self._least_bytes = min_bytes_per_second * window_seconds
        self._window_seconds = window_seconds
        self._waited_seconds = 0.0
        self._taken_bytes = 0
        self.too_slow = False

    @property
    def seconds_left(self) -> float:
        """Seconds of waiting until the window ends."""
        return self._window_seconds - self._waited_seconds

    def took(self, num_bytes: int) -> None:
        self._taken_bytes += num_bytes

    def waited(self, seconds: float) -> None:
        self._waited_seconds += seconds
        if self._waited_seconds >= self._window_seconds:
            self.too_slow = self.too_slow or self._taken_bytes < self._least_bytes
            self._waited_seconds, self._taken_bytes = 0.0, 0
