"""Between a group and what prepares its prompt."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from coppice.wire.reuse import ReuseReason
from engine.protocol import Completion, Engine, ExportSlot, Load, SampleRequest

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


class Preparation(Protocol):
    """What a group's samples load instead of computing it. Counts are of tokens.

    `links` enter the engine with the samples, of which the first carries `export`. `reason`: why
    there is nothing to load. `num_anchors` are those that the prompt was predicted from.
    """

    @property
    def links(self) -> list[SampleRequest]: ...

    @property
    def export(self) -> ExportSlot | None: ...

    @property
    def reason(self) -> ReuseReason | None: ...

    @property
    def num_computed(self) -> int:
        """By links, in front of the samples."""

    @property
    def num_prepared(self) -> int: ...

    @property
    def num_anchors(self) -> int: ...

    @property
    def round_trips(self) -> int:
        """Before the samples."""

    async def prepare(self, engine: Engine, watch: Watch) -> Load | None:
        """None: the prompt is computed. Broken: and nothing comes of it. Cancelling it leaves
        requests in the engine, which the watch knows."""

    async def heard(self, link: SampleRequest, done: Completion) -> None:
        """In their order."""

    def is_placed(self, num_cached: int) -> bool:
        """Whether anything that is not exact stands in front of a sample that had so many tokens
        cached."""

    def is_loaded(self, num_cached: int) -> bool:
        """Whether anything was."""

    def forget(self) -> None:
        """The engine knows no more that it was written: it is to be written anew."""

    def release(self, *, settled: bool) -> None:
        """Gives back what is pinned, however far it came. `settled`: every request that was to load
        has ended by itself."""
