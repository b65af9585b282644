"""Sending of requests with retries."""

from contextlib import suppress

from coppice.errors import CoppiceError
from coppice.retry import Retry
from coppice.transport.clock import Clock
from coppice.transport.driver import Driver
from coppice.transport.messages import HttpRequest, HttpResponse
from coppice.transport.retry_state import RetryState


class RequestSender:
    """Owner of the driver. It has no state between requests."""

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
        """Returns a successful response, or raises the exception of the last attempt.

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

    async def send_best_effort(self, call: HttpRequest) -> None:
        """Sends the request once and ignores errors, for a caller that is shutting down."""
        # httpx raises RuntimeError if the client was closed before its generator.
        with suppress(CoppiceError, RuntimeError):
            await self.driver.send(call)
