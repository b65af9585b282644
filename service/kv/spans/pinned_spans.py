"""Lease that pins the cached prompt spans of one group, and has missing spans written.

A span that is not cached is prefilled alone, from position 0 on. All spans are pinned until the
lease is released.
"""

import asyncio
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coppice.wire.kv_reuse import KvReuseReason
from coppice.wire.rollouts import PromptSpan
from engine.protocol.generation import Generation
from engine.types.kv import ExportSlot, KvLoad
from engine.types.samples import Completion, SampleRequest, Sampling
from service.kv.prompt_source import GroupMonitor
from service.kv.spans.cache import CacheEntry, SpanCache
from service.kv.spans.prompt_template import Scope

T = TypeVar("T")
PREFILL_ONLY = Sampling(max_tokens=1, temperature=0.0)


class ReuseFailed(Exception):
    """Raised if a prompt cannot reuse KV and must be prefilled."""

    def __init__(self, reason: KvReuseReason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True, kw_only=True, eq=False)
class SpanLease:
    """Span-cache entries that are pinned for one group until `release`.

    `num_prepared` counts the tokens of spans prefilled alone for this lease, `round_trips` the
    batches of such prefills.
    """

    cache: SpanCache
    scope: Scope
    priority: int
    num_prepared: int = 0
    round_trips: int = 0
    _entries: dict[int, CacheEntry] = field(default_factory=dict)
    _pinned: list[CacheEntry] = field(default_factory=list)
    _unwritten: dict[int, tuple[PromptSpan, CacheEntry]] = field(default_factory=dict)

    def acquire(self, spans: Mapping[int, PromptSpan]) -> dict[int, CacheEntry]:
        """Pin or reserve the cache entries of `spans`; returns them under the same indices.

        Entries may still have to be written, by this lease or by another one.
        """
        for index in sorted(spans):
            entry_and_ownership = self.cache.get_or_reserve(self.scope, spans[index])
            if entry_and_ownership is None:
                raise ReuseFailed("cache_full")
            cached, must_write = entry_and_ownership
            self._entries[index] = cached
            self._pinned.append(cached)
            if must_write:
                self._unwritten[id(cached)] = spans[index], cached
        return self._entries

    def pin(self, cached: CacheEntry) -> None:
        """Add an entry to the lease and pin it once more; another user must have it pinned."""
        assert cached.pins > 0, "the entry is not pinned"
        cached.pins += 1
        self._pinned.append(cached)

    def write_requests(self) -> list[tuple[SampleRequest, CacheEntry]]:
        """Engine requests that prefill each missing span alone and write it to the span cache."""
        return [
            (self.request(list(span.token_ids), export=cached.slot), cached)
            for span, cached in self._unwritten.values()
        ]

    async def write(self, engine: Generation, monitor: GroupMonitor) -> None:
        """Have missing spans written, and wait for the spans that other leases have written.

        Raises ReuseFailed if a span cannot be written.
        """
        if self._unwritten:
            await self._write(engine, monitor, self.write_requests())
        for cached in self._entries.values():
            await cancel_on_end(monitor, cached.ended.wait())
            if not cached.is_written:
                raise ReuseFailed("not_written")

    async def on_completed(
        self, cached: CacheEntry, request: SampleRequest, done: Completion
    ) -> bool:
        """Record the end of the request that writes an entry; returns whether it is written."""
        if done.finish in ("stop", "length"):
            self.num_prepared += len(request.prompt_token_ids) - done.num_cached_tokens
        is_written = await self.cache.finish_write(cached)
        self._unwritten.pop(id(cached), None)
        return is_written

    def forget(self) -> None:
        for cached in self._pinned:
            self.cache.forget(cached)

    def release(self, *, settled: bool) -> None:
        for cached in self._pinned:
            if self._unwritten.pop(id(cached), None) is not None:
                self.cache.abandon(cached)
            else:
                self.cache.unpin(cached, settled=settled)
        self._pinned.clear()
        self._entries.clear()

    def request(
        self, prompt: list[int], *, export: ExportSlot | None = None, load: KvLoad | None = None
    ) -> SampleRequest:
        return SampleRequest(
            id=uuid.uuid4().hex,
            prompt_token_ids=prompt,
            sampling=PREFILL_ONLY,
            priority=self.priority,
            cache_salt=self.scope.salt,
            export=export,
            speculation=False,
            load=load,
        )

    async def _write(
        self,
        engine: Generation,
        monitor: GroupMonitor,
        write_requests: Sequence[tuple[SampleRequest, CacheEntry]],
    ) -> None:
        self.round_trips += 1
        requests = [request for request, _ in write_requests]
        for request in requests:
            monitor.on_submitted(request.id)
        pending = await engine.submit(requests)
        if monitor.ends:
            await engine.abort([request.id for request in requests])
        done = []
        for request, awaited in zip(requests, pending, strict=True):
            done.append(await awaited)
            monitor.on_finished(request.id)
        if any(completion.finish in ("abort", "error") for completion in done):
            raise ReuseFailed("not_written")
        for (request, cached), completion in zip(write_requests, done, strict=True):
            if not await self.on_completed(cached, request, completion):
                raise ReuseFailed("not_written")


async def cancel_on_end(monitor: GroupMonitor, wait: Coroutine[Any, Any, T]) -> T | None:
    """Await a coroutine; cancel it and return None once the group is ending."""
    work_task, ended = asyncio.create_task(wait), asyncio.create_task(monitor.wait_for_end())
    try:
        await asyncio.wait((work_task, ended), return_when=asyncio.FIRST_COMPLETED)
        return work_task.result() if work_task.done() else None
    finally:
        work_task.cancel()
        ended.cancel()
        await asyncio.gather(work_task, ended, return_exceptions=True)
