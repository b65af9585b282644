"""Between what prepares a prompt and its group."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from coppice.wire.reuse import ReuseReason

T = TypeVar("T")


class Broken(Exception):
    """The prompt has to be computed whole."""

    def __init__(self, reason: ReuseReason) -> None:
        super().__init__(reason)
        self.reason = reason


class Watch(Protocol):
    """The group: told of requests that enter the engine, and of those that left it."""

    @property
    def ends(self) -> bool:
        """Nothing is wanted any more; what enters the engine now is to be aborted."""

    async def until_end(self) -> None:
        """Returns once nothing is wanted any more."""

    def entered(self, request_id: str) -> None: ...

    def left(self, request_id: str) -> None: ...


async def unless_it_ends(watch: Watch, wait: Coroutine[Any, Any, T]) -> T | None:
    """None, and the wait is cancelled, once nothing is wanted any more."""
    waiting, over = asyncio.create_task(wait), asyncio.create_task(watch.until_end())
    try:
        await asyncio.wait((waiting, over), return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        waiting.cancel()
        over.cancel()
        await asyncio.gather(waiting, over, return_exceptions=True)
