"""Brings a call to the server, again where that may help."""

from contextlib import suppress

from coppice.errors import CoppiceError
from coppice.retry import Retry
from coppice.transport.clock import Pace
from coppice.transport.driver import Driver
from coppice.transport.messages import Call, Reply
from coppice.transport.retry_state import Trouble


class Courier:
    """Owner of the driver. Keeps nothing from one call to the next."""

    def __init__(self, driver: Driver, pace: Pace, retry: Retry) -> None:
        self.driver = driver
        self.pace = pace
        self.retry = retry

    def trouble(
        self,
        call: Call,
        *,
        until: float | None = None,
        final: tuple[type[CoppiceError], ...] = (),
    ) -> Trouble:
        return Trouble(self.retry, self.pace, repeatable=call.repeatable, until=until, final=final)

    async def send(
        self,
        call: Call,
        *,
        until: float | None = None,
        final: tuple[type[CoppiceError], ...] = (),
    ) -> Reply:
        """A reply that succeeded, or the last attempt's exception.

        No attempt begins after `until`, and none follows an exception of the `final` kinds.
        """
        trouble = self.trouble(call, until=until, final=final)
        while True:
            try:
                reply = await self.driver.send(call)
                reply.check()
                return reply
            except CoppiceError as error:
                if not await trouble.endured(error):
                    raise

    async def leave(self, call: Call) -> None:
        """Sends it once, for somebody who is leaving and hears no answer."""
        # httpx raises RuntimeError where the client was closed before its generator was.
        with suppress(CoppiceError, RuntimeError):
            await self.driver.send(call)
