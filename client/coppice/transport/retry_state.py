"""One run of failures: whether another attempt is worth it, and when."""

import logging

from coppice.errors import CoppiceError, ProblemError, TransportError
from coppice.retry import Retry
from coppice.transport.clock import Pace

log = logging.getLogger("coppice")


class Trouble:
    """Of one call. `repeatable`: doing it twice is as good as doing it once.

    A problem is the server's word that it did not do the work, so any call may be repeated after a
    retryable one. After a lost connection nobody knows, unless nothing was sent.
    """

    def __init__(
        self,
        retry: Retry,
        pace: Pace,
        *,
        repeatable: bool,
        until: float | None = None,
        final: tuple[type[CoppiceError], ...] = (),
    ) -> None:
        self._retry = retry
        self._pace = pace
        self._repeatable = repeatable
        self._until = until
        self._final = final
        self._failures = 0
        self._began = 0.0

    def over(self) -> None:
        self._failures = 0

    async def endured(self, error: CoppiceError) -> bool:
        """Comes back when the next attempt is due, or with False if there is to be none."""
        now = self._pace.now()
        if self._failures == 0:
            self._began = now
        self._failures += 1
        if self._failures >= self._retry.attempts or not self._may_pass(error):
            return False
        wait = self._wait(error)
        if now + wait > self._end():
            return False
        log.warning("%s; trying again in %.1f s", error, wait)
        await self._pace.sleep(wait)
        return True

    def _may_pass(self, error: CoppiceError) -> bool:
        if isinstance(error, self._final) or not error.retryable:
            return False
        unknown = isinstance(error, TransportError) and not error.unsent
        return self._repeatable or not unknown

    def _wait(self, error: CoppiceError) -> float:
        """The random share keeps clients that failed together from coming back together."""
        asked = error.retry_after if isinstance(error, ProblemError) else None
        return (asked or 0.0) + self._pace.random() * self._retry.longest_wait(self._failures)

    def _end(self) -> float:
        end = self._began + self._retry.total_seconds
        return end if self._until is None else min(end, self._until)
