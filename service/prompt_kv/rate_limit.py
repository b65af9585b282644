"""Bandwidth limits: a maximum over all sender threads and a minimum per reader."""

import threading
import time
from collections.abc import Callable

BURST_SECONDS = 0.02
PIECE_BYTES = 2**20
PIECE_SECONDS = 0.1
LEAST_PIECE_BYTES = 2**12


class RateLimiter:
    """Thread-safe limit on the total bytes per second.

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
    """Throughput of one reader over the time that the server waits for its socket.

    Only that time counts, so waits for `RateLimiter` or for other readers do not make a reader
    slow. `too_slow` is set once the reader falls below the minimum rate over one window.
    """

    def __init__(self, min_bytes_per_second: float, window_seconds: float) -> None:
        self._least_bytes = min_bytes_per_second * window_seconds
        self._window_seconds = window_seconds
        self._waited_seconds = 0.0
        self._taken_bytes = 0
        self.too_slow = False

    @property
    def seconds_left(self) -> float:
        """Remaining seconds of waiting in the current window."""
        return self._window_seconds - self._waited_seconds

    def took(self, num_bytes: int) -> None:
        self._taken_bytes += num_bytes

    def waited(self, seconds: float) -> None:
        self._waited_seconds += seconds
        if self._waited_seconds >= self._window_seconds:
            self.too_slow = self.too_slow or self._taken_bytes < self._least_bytes
            self._waited_seconds, self._taken_bytes = 0.0, 0
