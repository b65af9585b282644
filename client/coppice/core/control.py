"""Pausing, resuming, asking how the server is."""

import time

from coppice.core.call import Call, json_call
from coppice.core.driver import Driver
from coppice.errors import CoppiceError, EngineUnavailable, TimedOut, TransportError
from coppice.wire.control import (
    HealthAnswer,
    PauseAnswer,
    PauseMode,
    PauseRequest,
    StatusAnswer,
)

_FIRST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 2.0
_LONGEST_PROBE_SECONDS = 5.0


class ControlOperations:
    """Needs a driver and keeps no state beside it."""

    _driver: Driver

    async def pause(self, mode: PauseMode = "keep", *, timeout: float | None = None) -> PauseAnswer:
        """Ends running samples (abort), lets them finish (wait) or freezes them (keep)."""
        call = json_call("POST", "/v1/pause", PauseRequest(mode=mode), silence=timeout)
        return (await self._driver.send(call)).read(PauseAnswer)

    async def resume(self) -> PauseAnswer:
        """Samples go on. Nothing happens if they were not paused."""
        reply = await self._driver.send(Call(method="POST", path="/v1/resume"))
        return reply.read(PauseAnswer)

    async def status(self) -> StatusAnswer:
        """What runs, on which weights, on what engine."""
        reply = await self._driver.send(Call(method="GET", path="/v1/status"))
        return reply.read(StatusAnswer)

    async def wait_until_ready(self, seconds: float) -> None:
        """Returns once the server takes rollouts; TimedOut, with the last reason, if it does not.

        A server that cannot be reached may be one that is not there yet, so that is waited for too.
        """
        deadline = time.monotonic() + seconds
        wait = _FIRST_WAIT_SECONDS
        while (refusal := await self._refusal(deadline)) is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimedOut(f"not ready after {seconds} s: {refusal}") from refusal
            await self._driver.sleep(min(wait, left))
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    async def _refusal(self, deadline: float) -> CoppiceError | None:
        left = max(deadline - time.monotonic(), _FIRST_WAIT_SECONDS)
        call = Call(method="GET", path="/readyz", silence=min(left, _LONGEST_PROBE_SECONDS))
        try:
            (await self._driver.send(call)).read(HealthAnswer)
        except (TransportError, EngineUnavailable) as error:
            return error
        return None
