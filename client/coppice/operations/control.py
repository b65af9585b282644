"""Pausing, resuming, asking how the server is."""

from coppice.errors import CoppiceError, EngineUnavailable, TimedOut, TransportError
from coppice.transport.messages import Call, json_call
from coppice.transport.request_sender import Courier
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
    """Needs a courier and keeps no state beside it."""

    _courier: Courier

    async def pause(self, mode: PauseMode = "keep", *, timeout: float | None = None) -> PauseAnswer:
        """Ends running samples (abort), lets them finish (wait) or freezes them (keep)."""
        call = json_call(
            "POST", "/v1/pause", PauseRequest(mode=mode), silence=timeout, repeatable=True
        )
        return (await self._courier.send(call)).read(PauseAnswer)

    async def resume(self) -> PauseAnswer:
        """Samples go on. Nothing happens if they were not paused."""
        reply = await self._courier.send(Call(method="POST", path="/v1/resume", repeatable=True))
        return reply.read(PauseAnswer)

    async def status(self) -> StatusAnswer:
        """What runs, on which weights, on what engine."""
        reply = await self._courier.send(Call(method="GET", path="/v1/status", repeatable=True))
        return reply.read(StatusAnswer)

    async def wait_until_ready(self, seconds: float) -> None:
        """Returns once the server takes rollouts; TimedOut, with the last reason, if it does not.

        A server that cannot be reached may be one that is not there yet, so that is waited for too.
        """
        deadline = self._courier.pace.now() + seconds
        wait = _FIRST_WAIT_SECONDS
        while (refusal := await self._refusal(deadline)) is not None:
            left = deadline - self._courier.pace.now()
            if left <= 0:
                raise TimedOut(f"not ready after {seconds} s: {refusal}") from refusal
            await self._courier.pace.sleep(min(wait, left))
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    async def _refusal(self, deadline: float) -> CoppiceError | None:
        left = max(deadline - self._courier.pace.now(), _FIRST_WAIT_SECONDS)
        call = Call(method="GET", path="/readyz", silence=min(left, _LONGEST_PROBE_SECONDS))
        try:
            (await self._courier.driver.send(call)).read(HealthAnswer)
        except (TransportError, EngineUnavailable) as error:
            return error
        return None
