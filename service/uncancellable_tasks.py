"""Runner of state changes that finish even if the calling task is cancelled."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class StateChanges:
    """Tasks of state changes of the server, which must not stop half-way."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` to completion even if the calling task is cancelled."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def wait_until_done(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)
