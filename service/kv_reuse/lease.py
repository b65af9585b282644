"""The segments of one group: found where they are kept, and else computed alone, from position 0
on. They stay where they are until they are given back."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.kv_types import ExportSlot, KvLoad
from engine.protocol import Completion, Engine, SampleRequest, Sampling
from service.kv_reuse.cache_entry import CacheEntry
from service.kv_reuse.layout import PromptSpan
from service.kv_reuse.monitor import GroupMonitor, ReuseFailed, cancel_on_end
from service.kv_reuse.prefix_order import Scope
from service.kv_reuse.store import SegmentCache

PREFILL_ONLY = Sampling(max_tokens=1, temperature=0.0)


@dataclass(slots=True, kw_only=True, eq=False)
class SegmentLease:
    """Counts are of what was computed alone for it."""

    store: SegmentCache
    scope: Scope
    priority: int
    num_prepared: int = 0
    round_trips: int = 0
    _entries: dict[int, CacheEntry] = field(default_factory=dict)
    _pinned: list[CacheEntry] = field(default_factory=list)
    _unwritten: dict[int, tuple[PromptSpan, CacheEntry]] = field(default_factory=dict)

    def acquire(self, spans: Mapping[int, PromptSpan]) -> dict[int, CacheEntry]:
        """By the same numbers. Some are still to be written, here or by others."""
        for index in sorted(spans):
            entry_and_ownership = self.store.get_or_reserve(self.scope, spans[index])
            if entry_and_ownership is None:
                raise ReuseFailed("store_full")
            cached, must_write = entry_and_ownership
            self._entries[index] = cached
            self._pinned.append(cached)
            if must_write:
                self._unwritten[id(cached)] = spans[index], cached
        return self._entries

    def pin(self, cached: CacheEntry) -> None:
        """Kept already, and for others too."""
        assert cached.pins > 0, "what nobody holds may be gone"
        cached.pins += 1
        self._pinned.append(cached)

    def write_requests(self) -> list[tuple[SampleRequest, CacheEntry]]:
        """What has to enter the engine so that all are written."""
        return [
            (self.request(list(span.token_ids), export=cached.slot), cached)
            for span, cached in self._unwritten.values()
        ]

    async def write(self, engine: Engine, monitor: GroupMonitor) -> None:
        """Returns when all are; Broken if they cannot be."""
        if self._unwritten:
            await self._write(engine, monitor, self.write_requests())
        for cached in self._entries.values():
            await cancel_on_end(monitor, cached.ended.wait())
            if not cached.is_written:
                raise ReuseFailed("not_written")

    async def on_completed(
        self, cached: CacheEntry, request: SampleRequest, done: Completion
    ) -> bool:
        """Its writer has ended: whether it is written."""
        if done.finish in ("stop", "length"):
            self.num_prepared += len(request.prompt_token_ids) - done.num_cached_tokens
        is_written = await self.store.finish_write(cached)
        self._unwritten.pop(id(cached), None)
        return is_written

    def forget(self) -> None:
        for cached in self._pinned:
            self.store.forget(cached)

    def release(self, *, settled: bool) -> None:
        for cached in self._pinned:
            if self._unwritten.pop(id(cached), None) is not None:
                self.store.abandon(cached)
            else:
                self.store.unpin(cached, settled=settled)
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
        engine: Engine,
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
