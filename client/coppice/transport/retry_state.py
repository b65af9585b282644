"""One run of failures: whether another attempt is worth it, and when."""

import logging

from coppice.errors import CoppiceError, ProblemError, TransportError
from coppice.retry import Retry
from coppice.transport.clock import Clock

log = logging.getLogger("coppice")


class RetryState:
    """Of one call. `is_idempotent`: doing it twice is as good as doing it once.

    A problem is the server's word that it did not do the work, so any call may be repeated after a
    retryable one. After a lost connection nobody knows, unless nothing was sent.
    """

    def __init__(
        self,
        retry: Retry,
        clock: Clock,
        *,
        is_idempotent: bool,
        deadline: float | None = None,
        non_retryable: tuple[type[CoppiceError], ...] = (),
    ) -> None:
        self._retry = retry
        self._clock = clock
        self._is_idempotent = is_idempotent
        self._deadline = deadline
        self._non_retryable = non_retryable
        self._failures = 0
        self._first_failure_at = 0.0

    def reset(self) -> None:
        self._failures = 0

    async def wait_before_retry(self, error: CoppiceError) -> bool:
        """Comes back when the next attempt is due, or with False if there is to be none."""
        now = self._clock.now()
        if self._failures == 0:
            self._first_failure_at = now
        self._failures += 1
        if self._failures >= self._retry.attempts or not self._may_retry(error):
            return False
        wait = self._wait(error)
        if now + wait > self._last_attempt_at():
            return False
        log.warning("%s; trying again in %.1f s", error, wait)
        await self._clock.sleep(wait)
        return True

    def _may_retry(self, error: CoppiceError) -> bool:
        if isinstance(error, self._non_retryable) or not error.retryable:
            return False
        unknown = isinstance(error, TransportError) and not error.unsent
        return self._is_idempotent or not unknown

    def _wait(self, error: CoppiceError) -> float:
        """The random share keeps clients that failed together from coming back together."""
        asked = error.retry_after if isinstance(error, ProblemError) else None
        return (asked or 0.0) + self._clock.random() * self._retry.longest_wait(self._failures)

    def _last_attempt_at(self) -> float:
        end = self._first_failure_at + self._retry.total_seconds
        return end if self._deadline is None else min(end, self._deadline)
