"""State of a sequence of failures, which decides about the next retry."""

import logging

from coppice.errors import CoppiceError, ProblemError, TransportError
from coppice.retry import Retry
from coppice.transport.clock import Clock

log = logging.getLogger("coppice")


class RetryState:
    """Retry state of one request. `is_idempotent`: a repetition has no further effect.

    A problem document means that the server did not do the work, so any request may be repeated
    after a retryable one. After a lost connection this is unknown, unless nothing was sent.
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
        """Sleeps until the next attempt is due, or returns False if there will be none."""
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
        """Delay in seconds, randomized so that clients that failed together do not retry together.

        A retry-after value of the server is added to it.
        """
        asked = error.retry_after if isinstance(error, ProblemError) else None
        return (asked or 0.0) + self._clock.random() * self._retry.longest_wait(self._failures)

    def _last_attempt_at(self) -> float:
        end = self._first_failure_at + self._retry.total_seconds
        return end if self._deadline is None else min(end, self._deadline)
