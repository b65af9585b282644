"""A bound on bytes a second, shared by all threads that send."""

import threading
import time
from collections.abc import Callable

BURST_SECONDS = 0.02


class Pace:
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
        self._paid_until = clock()

    def spend(self, num_bytes: int) -> None:
        if self._bytes_per_second is None:
            return
        with self._lock:
            now = self._clock()
            begin = max(self._paid_until, now - BURST_SECONDS)
            self._paid_until = begin + num_bytes / self._bytes_per_second
            wait = self._paid_until - now
        if wait > 0:
            self._sleep(wait)
