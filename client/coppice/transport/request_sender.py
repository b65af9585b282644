"""Brings a call to the server, again where that may help."""

from contextlib import suppress

from coppice.errors import CoppiceError
from coppice.retry import Retry
from coppice.transport.clock import Clock
from coppice.transport.driver import Driver
from coppice.transport.messages import HttpRequest, HttpResponse
from coppice.transport.retry_state import RetryState


class RequestSender:
    """Owner of the driver. Keeps nothing from one call to the next."""

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
        """A reply that succeeded, or the last attempt's exception.

        No attempt begins after `deadline`, and none follows an exception of the `non_retryable`
        kinds.
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
        """Sends it once, for somebody who is leaving and hears no answer."""
        # httpx raises RuntimeError where the client was closed before its generator was.
        with suppress(CoppiceError, RuntimeError):
            await self.driver.send(call)
