"""Cached spans pinned for one group, and the engine requests that prefill missing spans.

A span that is not cached is prefilled alone, from position 0 on.
"""

import asyncio
import uuid
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from coppice.wire.kv_reuse import KvReuseReason
from coppice.wire.rollouts import PromptSpan
from engine.protocol.generation import Generation
from engine.types.kv import ExportSlot, KvLoad
from engine.types.samples import Completion, SampleRequest, Sampling
from service.kv.prompt_source import GroupMonitor
from service.kv.spans.index import SpanEntry, SpanIndex
from service.kv.spans.prompt_template import Scope

T = TypeVar("T")
PREFILL_ONLY = Sampling(max_tokens=1, temperature=0.0)


class ReuseFailed(Exception):
    """Raised if a prompt cannot reuse KV and must be prefilled."""

    def __init__(self, reason: KvReuseReason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True, kw_only=True, eq=False)
class PinnedSpans:
    """Entries of spans, and of observed prompts, that are pinned for one group until `release`.

    `num_prepared` counts the tokens of spans prefilled alone for this group, `round_trips` the
    batches of such prefills.
    """

    index: SpanIndex
    scope: Scope
    priority: int
    num_prepared: int = 0
    round_trips: int = 0
    _pinned: list[SpanEntry] = field(default_factory=list)
    _unwritten: dict[SpanEntry, PromptSpan] = field(default_factory=dict)

    def acquire(self, spans: Mapping[int, PromptSpan]) -> dict[int, SpanEntry]:
        """Pin or reserve the entries of `spans`; returns them under the same indices.

        Entries may still have to be written, for this group or for another one.
        """
        entries = {}
        for index in sorted(spans):
            found = self.index.get_or_reserve(self.scope, spans[index])
            if found is None:
                raise ReuseFailed("cache_full")
            entries[index], must_write = found
            self._pinned.append(entries[index])
            if must_write:
                self._unwritten[entries[index]] = spans[index]
        return entries

    def pin(self, entry: SpanEntry) -> None:
        """Pin an entry once more, which another user has pinned."""
        assert entry.pins > 0, "the entry is not pinned"
        self.index.store.pin(entry)
        self._pinned.append(entry)

    def write_requests(self) -> list[tuple[SampleRequest, SpanEntry]]:
        """Engine requests that prefill each missing span alone and write it."""
        return [
            (self.request(list(span.token_ids), export=entry.slot), entry)
            for entry, span in self._unwritten.items()
        ]

    async def write(self, engine: Generation, monitor: GroupMonitor) -> None:
        """Have missing spans written, and wait for the spans that other groups have written.

        Raises ReuseFailed if a span cannot be written.
        """
        if self._unwritten:
            await self._write(engine, monitor)
        for entry in self._pinned:
            await cancel_on_end(monitor, entry.ended.wait())
            if not entry.is_committed:
                raise ReuseFailed("not_written")

    async def on_completed(
        self, entry: SpanEntry, request: SampleRequest, done: Completion
    ) -> bool:
        """Record the end of the request that writes an entry; returns whether it is written."""
        if done.finish in ("stop", "length"):
            self.num_prepared += len(request.prompt_token_ids) - done.num_cached_tokens
        is_written = await self.index.finish_write(entry)
        self._unwritten.pop(entry, None)
        return is_written

    def forget(self) -> None:
        for entry in self._pinned:
            self.index.evict(entry)

    def release(self, *, settled: bool) -> None:
        """Unpin all entries, at once if `settled`, else after a flush of the engine's exports.

        If it is `settled`, the engine no longer writes or reads them for this group.
        """
        store = self.index.store
        unpin = store.unpin if settled else store.unpin_after_flush
        for entry in self._pinned:
            if self._unwritten.pop(entry, None) is not None:
                self.index.abandon(entry)
            else:
                unpin(entry)
        self._pinned.clear()

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

    async def _write(self, engine: Generation, monitor: GroupMonitor) -> None:
        self.round_trips += 1
        write_requests = self.write_requests()
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
        for (request, entry), completion in zip(write_requests, done, strict=True):
            if not await self.on_completed(entry, request, completion):
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
