"""Concurrency limit with fair turns between clients (API keys and their agent sessions)."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from anyio import CapacityLimiter

from engine.errors import QueueFull

Result = TypeVar("Result")

SESSION_SHARE = 4
"""The part of a key's bytes that one of its agent sessions may have, as a divisor."""
LONG_SECONDS: Final = 2.0
"""A key with a piece of work that takes more CPU time is slow for a while."""
SLOW_SECONDS: Final = 600.0


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

    Keys with long work, as `record` is told, share one place. So they do not delay a key without,
    with an exception: a key is not slow before its first long work has ended. As many keys as there
    are places that begin such work at the same time delay all others until one has ended. This is
    possible once per key and ten minutes, and only the operator adds keys.
    """

    def __init__(
        self,
        work: str,
        num_places: int,
        *,
        key_bytes: int,
        total_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._key_bytes = key_bytes
        self._all = _Places(CapacityLimiter(num_places), total_bytes)
        self._clock = clock
        self._slow = CapacityLimiter(1)
        self._slow_until: dict[str, float] = {}
        self._clients: dict[str, _Places] = {}

    @property
    def num_waiting(self) -> int:
        """Number of pieces of work that wait for a place."""
        limiters = [self._slow, *(each.limiter for each in (self._all, *self._clients.values()))]
        return sum(limiter.statistics().tasks_waiting for limiter in limiters)

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
                for each in path:
                    if each is self._all and self._is_slow(client):
                        await places.enter_async_context(self._slow)
                    await places.enter_async_context(each.limiter)
                has_place.set()
                return await function()

    def record(self, client: str, cpu_seconds: float) -> None:
        """Make a client's key slow for a while if a piece of its work took long.

        Entries that have expired are dropped. Each piece took `LONG_SECONDS` at least, so that few
        hundred entries are kept.
        """
        if cpu_seconds > LONG_SECONDS:
            now, key = self._clock(), _names(client)[-1]
            kept = {name: end for name, end in self._slow_until.items() if end > now}
            self._slow_until = kept | {key: now + SLOW_SECONDS}

    def _is_slow(self, client: str) -> bool:
        """True if the key is slow, to which the long work of its agent sessions belongs."""
        return self._slow_until.get(_names(client)[-1], 0.0) > self._clock()

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
