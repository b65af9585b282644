"""Client operations that pause a server or put it to sleep, and query status and readiness."""

from collections.abc import Sequence

from coppice.errors import CoppiceError, EngineUnavailable, TimedOut, TransportError
from coppice.transport.messages import HttpRequest, json_request
from coppice.transport.retry import RequestSender
from coppice.wire.pause import (
    DEFAULT_PAUSE_LEASE_SECONDS,
    DEFAULT_SLEEP_LEASE_SECONDS,
    PauseAnswer,
    PauseMode,
    PauseRequest,
    ResumeRequest,
    SleepAnswer,
    SleepLevel,
    SleepRequest,
    SleepTag,
    WakeRequest,
)
from coppice.wire.status import HealthAnswer, StatusAnswer

_FIRST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 2.0
_LONGEST_PROBE_SECONDS = 5.0


class ServerStateOperations:
    """Client operations: pause, resume, status and wait for readiness."""

    _sender: RequestSender

    async def pause(
        self,
        mode: PauseMode = "keep",
        *,
        lease_seconds: float | None = DEFAULT_PAUSE_LEASE_SECONDS,
        timeout: float | None = None,
    ) -> PauseAnswer:
        """Pauses the engine; running samples end (abort), finish (wait) or freeze (keep).

        The pause ends after `lease_seconds` unless the call is repeated. None: only by `resume`.
        """
        request = PauseRequest(mode=mode, lease_seconds=lease_seconds)
        call = json_request(
            "POST",
            "/v1/pause",
            request,
            read_timeout=timeout,
            is_idempotent=True,
            sends_none=True,
        )
        return (await self._sender.send(call)).read(PauseAnswer)

    async def resume(self, *, all: bool = False) -> PauseAnswer:
        """Ends the pause of this API key, or those of `all` keys.

        It has no effect if the server is not paused.
        """
        call = json_request("POST", "/v1/resume", ResumeRequest(all=all), is_idempotent=True)
        return (await self._sender.send(call)).read(PauseAnswer)

    async def sleep(
        self,
        level: SleepLevel = 1,
        *,
        tags: Sequence[SleepTag] = ("kv_cache", "weights"),
        mode: PauseMode = "keep",
        lease_seconds: float | None = DEFAULT_SLEEP_LEASE_SECONDS,
        timeout: float | None = None,
    ) -> SleepAnswer:
        """Pauses the engine and releases its memory, so that a trainer can use the device.

        Level 1 keeps the weights in host memory, level 2 drops them. The engine wakes after
        `lease_seconds` unless the call is repeated; by default, and at most, after the server's
        `limits.max_lease_seconds`. None: only by `wake`.
        """
        request = SleepRequest(level=level, tags=list(tags), mode=mode, lease_seconds=lease_seconds)
        call = json_request(
            "POST",
            "/v1/sleep",
            request,
            read_timeout=timeout,
            is_idempotent=True,
            sends_none=True,
        )
        return (await self._sender.send(call)).read(SleepAnswer)

    async def wake(
        self,
        *,
        tags: Sequence[SleepTag] = ("kv_cache", "weights"),
        all: bool = False,
        timeout: float | None = None,
    ) -> SleepAnswer:
        """Allocates the engine's memory again; once everything is awake, sampling resumes.

        To send new weights first, wake `weights`, publish them, and wake the rest.
        """
        call = json_request(
            "POST",
            "/v1/wake",
            WakeRequest(tags=list(tags), all=all),
            read_timeout=timeout,
            is_idempotent=True,
        )
        return (await self._sender.send(call)).read(SleepAnswer)

    async def status(self) -> StatusAnswer:
        """Returns the engine's properties, the active weights version and rollout counts."""
        return await self._sender.get("/v1/status", StatusAnswer)

    async def wait_until_ready(self, seconds: float) -> None:
        """Waits until the server accepts rollouts.

        Raises TimedOut, with the last reason, after `seconds`. An unreachable server is also waited
        for, because it may still be starting.
        """
        deadline = self._sender.clock.now() + seconds
        wait = _FIRST_WAIT_SECONDS
        while (refusal := await self._refusal(deadline)) is not None:
            left = deadline - self._sender.clock.now()
            if left <= 0:
                raise TimedOut(f"not ready after {seconds} s: {refusal}") from refusal
            await self._sender.clock.sleep(min(wait, left))
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    async def _refusal(self, deadline: float) -> CoppiceError | None:
        left = max(deadline - self._sender.clock.now(), _FIRST_WAIT_SECONDS)
        call = HttpRequest(
            method="GET", path="/readyz", read_timeout=min(left, _LONGEST_PROBE_SECONDS)
        )
        try:
            (await self._sender.driver.send(call)).read(HealthAnswer)
        except (TransportError, EngineUnavailable) as error:
            return error
        return None
