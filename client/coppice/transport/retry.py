"""Retries of HTTP requests: the backoff policy and the sender that applies it."""

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Self, TypeVar

from pydantic import BaseModel

from coppice.errors import CoppiceError, ProblemError, TransportError
from coppice.transport.driver import Clock, Driver
from coppice.transport.messages import HttpRequest, HttpResponse

A = TypeVar("A", bound=BaseModel)

_MOST_DOUBLINGS = 64
log = logging.getLogger("coppice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Retry policy: exponential backoff with jitter.

    The delay doubles from base_seconds to max_seconds and is multiplied by a random factor. A
    retry-after value from the server is waited for in addition. A series of failures starts with
    its first failure and ends when new data is received: a stream that breaks, resumes and breaks
    again starts a new series.
    """

    attempts: int = 8
    """Maximum number of attempts, including the first."""
    base_seconds: float = 0.5
    max_seconds: float = 30.0
    total_seconds: float = 300.0
    """No attempt starts later than this after the first failure."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError("attempts must be at least 1")
        if not 0 <= self.base_seconds <= self.max_seconds or not self.total_seconds >= 0:
            raise ValueError("0 <= base_seconds <= max_seconds and 0 <= total_seconds must hold")

    @classmethod
    def none(cls) -> Self:
        """Policy without retries; closing the connection of a rollout then cancels the rollout."""
        return cls(attempts=1)

    @property
    def is_enabled(self) -> bool:
        """True if a failed attempt is repeated."""
        return self.attempts > 1

    def longest_wait(self, failures: int) -> float:
        """Upper bound of the delay in seconds after a number of consecutive failures."""
        doublings = min(failures - 1, _MOST_DOUBLINGS)
        return min(self.max_seconds, self.base_seconds * 2.0**doublings)


class RetryState:
    """Counts the failures of one request, and decides whether and when to retry it.

    `is_idempotent`: a repetition of the request has no further effect.

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
        """Sleeps until the request may be sent again, or returns False if it must not be."""
        now = self._clock.now()
        if self._failures == 0:
            self._first_failure_at = now
        self._failures += 1
        if self._failures >= self._retry.attempts or not self._may_retry(error):
            return False
        wait = self._wait(error)
        if now + wait > self._last_attempt_at():
            return False
        level = logging.WARNING if self._failures == 1 else logging.DEBUG  # one line per series
        log.log(level, "%s; trying again in %.1f s", error, wait)
        await self._clock.sleep(wait)
        return True

    def _may_retry(self, error: CoppiceError) -> bool:
        if isinstance(error, self._non_retryable) or not error.retryable:
            return False
        unknown = isinstance(error, TransportError) and not error.unsent
        return self._is_idempotent or not unknown

    def _wait(self, error: CoppiceError) -> float:
        """Delay before a retry in seconds, randomized so that clients do not retry all at once.

        A retry-after value of the server is added to the delay.
        """
        asked = error.retry_after if isinstance(error, ProblemError) else None
        return (asked or 0.0) + self._clock.random() * self._retry.longest_wait(self._failures)

    def _last_attempt_at(self) -> float:
        end = self._first_failure_at + self._retry.total_seconds
        return end if self._deadline is None else min(end, self._deadline)


class RequestSender:
    """Sends HTTP requests with retries; owns the driver, and has no state between requests."""

    def __init__(self, driver: Driver, clock: Clock, retry: Retry) -> None:
        self.driver = driver
        self.clock = clock
        self.retry = retry

    def retry_state(
        self,
        call: HttpRequest,
        *,
        deadline: float | None = None,
        non_retryable: tuple[type[CoppiceError], ...] = (),
    ) -> RetryState:
        return RetryState(
            self.retry,
            self.clock,
            is_idempotent=call.is_idempotent,
            deadline=deadline,
            non_retryable=non_retryable,
        )

    async def send(
        self,
        call: HttpRequest,
        *,
        deadline: float | None = None,
        non_retryable: tuple[type[CoppiceError], ...] = (),
    ) -> HttpResponse:
        """Sends a request with retries; returns the response, or raises the last exception.

        No attempt starts after `deadline`, and there is no retry after an exception of a
        `non_retryable` class.
        """
        retry_state = self.retry_state(call, deadline=deadline, non_retryable=non_retryable)
        while True:
            try:
                reply = await self.driver.send(call)
                reply.check()
                return reply
            except CoppiceError as error:
                if not await retry_state.wait_before_retry(error):
                    raise

    async def get(self, path: str, model: type[A]) -> A:
        """Sends a GET request and parses the response as `model`."""
        call = HttpRequest(method="GET", path=path, is_idempotent=True)
        return (await self.send(call)).read(model)

    async def send_best_effort(self, call: HttpRequest) -> None:
        """Sends a request once and ignores errors, for a caller that is shutting down."""
        # httpx raises RuntimeError if the client was closed before its generator.
        with suppress(CoppiceError, RuntimeError):
            await self.driver.send(call)
