"""Wait of an activation in mode `wait` for the running samples."""

import asyncio
from typing import Any

from coppice.wire.weights import ActivationMode
from service.http.errors import ServiceError, VersionConflict
from service.rollouts.manager import RolloutManager


class IdleWait:
    """Wait of one activation until no rollout is sampling, which other requests can end.

    Before its end the activation has changed nothing.
    """

    def __init__(self, rollouts: RolloutManager) -> None:
        self._rollouts = rollouts
        self._requested: tuple[str, ActivationMode] | None = None
        self._ended: asyncio.Future[ServiceError] | None = None

    def request(self, label: str, mode: ActivationMode) -> None:
        """Record a requested activation, which ends the wait of a different one."""
        if (label, mode) != self._requested:
            self._requested = label, mode
            self.end(self._replaced())

    async def run(self, label: str, mode: ActivationMode) -> None:
        """Wait for the running samples; raises the error with which the wait was ended."""
        if self._rollouts.is_idle:
            return
        if self._requested != (label, mode):
            raise self._replaced()
        ended = self._ended = asyncio.get_running_loop().create_future()
        idle = asyncio.ensure_future(self._rollouts.wait_until_idle())
        either: set[asyncio.Future[Any]] = {idle, ended}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not idle.done():
                raise ended.result()
            idle.result()
        finally:
            self._ended = None
            idle.cancel()
            await asyncio.gather(idle, return_exceptions=True)

    def end(self, error: ServiceError) -> None:
        """Let the activation that waits, if there is one, fail with this error."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)

    def _replaced(self) -> VersionConflict:
        assert self._requested is not None, "every activation is requested"
        label, mode = self._requested
        return VersionConflict(f"an activation of {label!r} in mode {mode} has replaced this one")
