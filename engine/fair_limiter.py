"""Limit of the work that runs at a time, with turns between the clients whose work waits."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from anyio import CapacityLimiter

from engine.errors import QueueFull

Result = TypeVar("Result")

SESSION_SHARE = 4
"""The part of a key's bytes that one of its agent sessions may have, as a divisor."""


@dataclass(slots=True)
class _Places:
    """Places for the work of one session, of one key, or of all, with the bytes of this work."""

    limiter: CapacityLimiter
    max_bytes: int
    num_bytes: int = 0
    num_users: int = 0


class FairLimiter:
    """Limit of the work that runs at a time, in which clients take turns.

    A client is `KEY`, or `KEY/SESSION` for an agent session of the key. Of the work that waits, one
    piece per session waits with the other sessions of its key, and one per key with the other keys,
    in order of arrival. The bytes of all work are limited, per key and in total; one session may
    have a quarter of its key's. Used from one event loop.
    """

    def __init__(self, work: str, num_places: int, *, key_bytes: int, total_bytes: int) -> None:
        self._work = work
        self._key_bytes = key_bytes
        self._all = _Places(CapacityLimiter(num_places), total_bytes)
        self._clients: dict[str, _Places] = {}

    @property
    def num_waiting(self) -> int:
        """Number of pieces of work that wait for a place."""
        every = (self._all, *self._clients.values())
        return sum(each.limiter.statistics().tasks_waiting for each in every)

    async def run(
        self, client: str, num_bytes: int, function: Callable[[], Awaitable[Result]]
    ) -> Result:
        """Await `function()` once the client has a place, and return the result.

        Raises QueueFull if too many bytes run or wait; work of 0 bytes is never refused. When the
        caller is cancelled, waiting work is dropped; running work keeps its place until it ends.
        """
        has_place = asyncio.Event()
        job = asyncio.create_task(self._run(client, num_bytes, function, has_place))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            if has_place.is_set():
                job.add_done_callback(_retrieve_error)
            else:
                job.cancel()
            raise

    async def _run(
        self,
        client: str,
        num_bytes: int,
        function: Callable[[], Awaitable[Result]],
        has_place: asyncio.Event,
    ) -> Result:
        with self.counted(client, num_bytes) as path:
            async with AsyncExitStack() as places:
                for limiter in self._in_order(client, [each.limiter for each in path]):
                    await places.enter_async_context(limiter)
                has_place.set()
                return await function()

    def _in_order(
        self, client: str, limiters: Iterable[CapacityLimiter]
    ) -> Iterable[CapacityLimiter]:
        """Limiters that work of a client passes, each given when it has passed the one before."""
        return limiters

    @contextmanager
    def counted(self, client: str, num_bytes: int) -> Iterator[list[_Places]]:
        """Context manager that counts bytes of a client, without a place. Raises QueueFull."""
        path = self._path(client)
        for each in path:
            each.num_users += 1
            each.num_bytes += num_bytes
        try:
            for each in path:
                if num_bytes and num_bytes < each.num_bytes > each.max_bytes:
                    raise QueueFull(self._work, of_client=each is not self._all)
            yield path
        finally:
            for each in path:
                each.num_bytes -= num_bytes
                each.num_users -= 1
            for name in _names(client):
                if not self._clients[name].num_users:
                    del self._clients[name]

    def _path(self, client: str) -> list[_Places]:
        """Places that work of a client needs, in the order in which it gets them."""
        path = []
        for name in _names(client):
            share = 1 if "/" not in name else SESSION_SHARE
            places = _Places(CapacityLimiter(1), self._key_bytes // share)
            path.append(self._clients.setdefault(name, places))
        return [*path, self._all]


def _names(client: str) -> tuple[str, ...]:
    key, _, session = client.partition("/")
    return (client, key) if session else (key,)


def _retrieve_error(job: "asyncio.Task[object]") -> None:
    """Mark the error of work whose caller was cancelled as seen, so that asyncio logs nothing."""
    if not job.cancelled():
        job.exception()
