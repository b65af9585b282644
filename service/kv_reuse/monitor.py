"""Interface between the preparation of a prompt and its group."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from coppice.wire.reuse import ReuseReason

T = TypeVar("T")


class ReuseFailed(Exception):
    """The prompt cannot reuse KV and must be prefilled."""

    def __init__(self, reason: ReuseReason) -> None:
        super().__init__(reason)
        self.reason = reason


class GroupMonitor(Protocol):
    """Group as seen by its plan: tracks the plan's engine requests and signals its end."""

    @property
    def ends(self) -> bool:
        """True once the group is ending; requests submitted from then on must be aborted."""

    async def wait_for_end(self) -> None:
        """Wait until the group is ending."""

    def on_submitted(self, request_id: str) -> None: ...

    def on_finished(self, request_id: str) -> None: ...


async def cancel_on_end(monitor: GroupMonitor, wait: Coroutine[Any, Any, T]) -> T | None:
    """Result of the coroutine; None, with the coroutine cancelled, once the group is ending."""
    work_task, ended = asyncio.create_task(wait), asyncio.create_task(monitor.wait_for_end())
    try:
        await asyncio.wait((work_task, ended), return_when=asyncio.FIRST_COMPLETED)
        return work_task.result() if work_task.done() else None
    finally:
        work_task.cancel()
        ended.cancel()
        await asyncio.gather(work_task, ended, return_exceptions=True)
