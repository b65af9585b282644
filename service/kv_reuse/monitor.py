"""Between what prepares a prompt and its group."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from coppice.wire.reuse import ReuseReason

T = TypeVar("T")


class ReuseFailed(Exception):
    """The prompt has to be computed whole."""

    def __init__(self, reason: ReuseReason) -> None:
        super().__init__(reason)
        self.reason = reason


class GroupMonitor(Protocol):
    """The group: told of requests that enter the engine, and of those that left it."""

    @property
    def ends(self) -> bool:
        """Nothing is wanted any more; what enters the engine now is to be aborted."""

    async def wait_for_end(self) -> None:
        """Returns once nothing is wanted any more."""

    def on_submitted(self, request_id: str) -> None: ...

    def on_finished(self, request_id: str) -> None: ...


async def cancel_on_end(monitor: GroupMonitor, wait: Coroutine[Any, Any, T]) -> T | None:
    """None, and the wait is cancelled, once nothing is wanted any more."""
    work_task, ended = asyncio.create_task(wait), asyncio.create_task(monitor.wait_for_end())
    try:
        await asyncio.wait((work_task, ended), return_when=asyncio.FIRST_COMPLETED)
        return work_task.result() if work_task.done() else None
    finally:
        work_task.cancel()
        ended.cancel()
        await asyncio.gather(work_task, ended, return_exceptions=True)
