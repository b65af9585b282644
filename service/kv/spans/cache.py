"""Span cache: KV of spans of prompts in a shared-memory arena of bounded size.

An entry is found only under its API key, cache salt, cache key, text and weights epoch (number of
activations). The engine writes it once, by a prefill of the span alone from position 0 on, and
loads it at other positions. Entries that are not pinned are evicted in LRU order. If none is left,
`evict_anchor` evicts an anchor. When entries of earlier weights are dropped,
`drop_outdated_anchors` drops the anchors of earlier weights. The AnchorStore sets both callbacks.
Bytes that the engine may still read or write are not freed before its exports are flushed.

Not thread-safe; runs on one event loop.
"""

import asyncio
import logging
import struct
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from coppice.wire.kv_reuse import KvReuseReason
from coppice.wire.rollouts import PromptSpan
from engine.errors import EngineError
from engine.protocol.prompt_kv import PromptKv
from engine.types.kv import ExportSlot, ExportStatus, KvFormat
from service.kv.arena import (
    PAGE_BYTES,
    Arena,
    Extent,
    ExtentAllocator,
    FreeBytes,
    default_capacity_bytes,
    free_bytes,
)
from service.kv.spans.prompt_template import Scope, digest

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
log = logging.getLogger(__name__)


class EntryKey(NamedTuple):
    """Key of a span-cache entry: isolation scope, weights epoch, cache key and token digest."""

    scope: Scope
    epoch: int
    cache_key: str
    digest: bytes


@dataclass(slots=True, kw_only=True, eq=False)
class CacheEntry:
    """KV of one span, or of a whole observed prompt, in the arena of the span cache.

    `ended` is set once `is_written` is final. The entry is not freed while it has `pins`.
    """

    slot: ExportSlot
    extent: Extent
    key: EntryKey
    pins: int = 0
    is_written: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class SpanCache:
    """Cache of the KV of prompt spans, which the engine writes once and loads into later prompts.

    `open` it once the engine serves, `close` it after the last group has ended. `reason` says why
    the cache is unavailable; it is None if the cache is available.
    """

    def __init__(
        self,
        engine: PromptKv,
        *,
        directory: Path,
        capacity_bytes: int | None,
        epoch: Callable[[], int],
        get_free_bytes: FreeBytes = free_bytes,
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._epoch = epoch
        self._get_free_bytes = get_free_bytes
        self.reason: KvReuseReason | None = "disabled"
        self.evict_anchor: Callable[[], bool] = lambda: False
        self.drop_outdated_anchors: Callable[[], object] = lambda: None
        self._arena: Arena | None = None
        self._extents = ExtentAllocator(0)
        self._entries: OrderedDict[EntryKey, CacheEntry] = OrderedDict()
        self._unpin_tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Create the arena of the cache. On failure, sets `reason`; all prompts are prefilled."""
        if self._capacity_bytes == 0:
            return
        info = self._engine.info
        if info.kv_format is None:
            self.reason = info.kv_reason or "unsupported_cache"
            return
        if info.kv_format.not_movable is not None:
            log.warning("spans cannot be spliced: %s", info.kv_format.not_movable)
            self.reason = "not_movable"
            return
        self._arena = Arena.create(
            self._directory, self._wanted_bytes(), get_free_bytes=self._get_free_bytes
        )
        if self._arena is None:
            self.reason = "no_shm"
            return
        self._extents = ExtentAllocator(self._arena.num_bytes)
        self._words = struct.Struct(f"<{info.tensor_parallel_size}Q")
        self.reason = None

    def _wanted_bytes(self) -> int:
        """Configured size, or half of the prompt-KV arena's default size, which comes first."""
        if self._capacity_bytes is not None:
            return self._capacity_bytes
        return default_capacity_bytes(self._directory, self._get_free_bytes) // 2

    async def close(self) -> None:
        for task in self._unpin_tasks:
            task.cancel()
        await asyncio.gather(*self._unpin_tasks, return_exceptions=True)
        if self._arena is not None:
            self._arena.close()

    @property
    def view(self) -> memoryview:
        assert self._arena is not None, "the cache is open"
        return self._arena.view

    @property
    def epoch(self) -> int:
        return self._epoch()

    @property
    def kv_format(self) -> KvFormat:
        assert self._engine.info.kv_format is not None, "the cache is open"
        return self._engine.info.kv_format

    @property
    def num_bytes(self) -> int:
        """Allocated bytes of the arena, including dropped entries that are still pinned."""
        return self._extents.capacity_bytes - self._extents.free_bytes

    @property
    def num_spans(self) -> int:
        return len(self._entries)

    def get_or_reserve(self, scope: Scope, span: PromptSpan) -> tuple[CacheEntry, bool] | None:
        """Pin the entry of a span, or reserve one; None if there is no room.

        The second value is True if the entry is new and the caller must have it written.
        """
        assert span.cache_key is not None, "only spans with a cache key are cached"
        self._drop_outdated()
        key = EntryKey(scope, self._epoch(), span.cache_key, digest(span.token_ids))
        cached = self._entries.get(key)
        if cached is not None:
            self._entries.move_to_end(key)
            cached.pins += 1
            return cached, False
        cached = self.reserve(len(span.token_ids), key)
        if cached is None:
            return None
        self._drop_other_texts(key)
        self._entries[key] = cached
        return cached, True

    def reserve(self, num_tokens: int, key: EntryKey) -> CacheEntry | None:
        """Allocate an unwritten, pinned entry, evicting others if needed; None without room."""
        assert self._arena is not None, "the cache is open"
        num_bytes = PAGE_BYTES + _data_bytes(self.kv_format, num_tokens)
        extent = self._extents.allocate(num_bytes)
        if extent is None and num_bytes > self._extents.capacity_bytes:
            return None  # no eviction would make enough room
        while extent is None and (self._evict_one() or self.evict_anchor()):
            extent = self._extents.allocate(num_bytes)
        if extent is None:
            return None
        if not self._arena.back(extent.start, extent.start + PAGE_BYTES):
            self._extents.release(extent)
            return None
        self._words.pack_into(self._arena.view, extent.start, *[0] * (self._words.size // 8))
        slot = ExportSlot(
            arena=self._arena.path,
            offset=extent.start + PAGE_BYTES,
            status_offset=extent.start,
            num_tokens=num_tokens,
            name=uuid.uuid4().hex,
        )
        return CacheEntry(slot=slot, extent=extent, key=key, pins=1)

    async def finish_write(self, cached: CacheEntry) -> bool:
        """Record the end of the request that writes an entry; returns whether it is written."""
        if not self.is_committed(cached):
            await self._engine.flush_exports()
        cached.is_written = self.is_committed(cached)
        if not cached.is_written:
            self.forget(cached)
        cached.ended.set()
        return cached.is_written

    def abandon(self, cached: CacheEntry) -> None:
        """Drop and unpin an entry that will not be written; wake up the tasks that wait for it."""
        self.forget(cached)
        cached.ended.set()
        self.unpin(cached, settled=False)

    def unpin(self, cached: CacheEntry, *, settled: bool) -> None:
        """Release one pin of an entry, at once if `settled`, else after a flush of the exports.

        `settled`: the engine no longer writes or reads the entry on behalf of the caller.
        """
        assert cached.pins > 0, "unpinned more often than pinned"
        if settled:
            self._unpin_now(cached)
            return
        task = asyncio.create_task(self._unpin_when_settled(cached))
        self._unpin_tasks.add(task)
        task.add_done_callback(self._unpin_tasks.discard)

    def check(self) -> None:
        """Assert the invariants of the cache's allocator and of its index by key."""
        self._extents.check()
        assert all(key == cached.key for key, cached in self._entries.items())

    async def _unpin_when_settled(self, cached: CacheEntry) -> None:
        try:
            await self._engine.flush_exports()
        except EngineError:
            return  # the engine is gone, so the bytes are not needed again
        self._unpin_now(cached)

    def _unpin_now(self, cached: CacheEntry) -> None:
        cached.pins -= 1
        if not cached.pins and self._entries.get(cached.key) is not cached:
            self._extents.release(cached.extent)

    def is_committed(self, cached: CacheEntry) -> bool:
        assert self._arena is not None
        words = self._words.unpack_from(self._arena.view, cached.slot.status_offset)
        return all(status == ExportStatus.COMMITTED for status in words)

    def _drop_outdated(self) -> None:
        epoch = self._epoch()
        for key in [key for key in self._entries if key.epoch != epoch]:
            self.forget(self._entries[key])
        self.drop_outdated_anchors()

    def _drop_other_texts(self, key: EntryKey) -> None:
        """Drop unpinned entries that hold another text under the same scope and cache key."""
        for other, cached in list(self._entries.items()):
            is_same = (other.scope, other.cache_key) == (key.scope, key.cache_key)
            if is_same and not cached.pins:
                self.forget(cached)

    def _evict_one(self) -> bool:
        unused = next((cached for cached in self._entries.values() if not cached.pins), None)
        if unused is not None:
            self.forget(unused)
        return unused is not None

    def forget(self, cached: CacheEntry) -> None:
        """Remove an entry from the cache's index; its bytes are freed once it is not pinned."""
        if self._entries.get(cached.key) is not cached:
            return
        del self._entries[cached.key]
        if not cached.pins:
            self._extents.release(cached.extent)


def _data_bytes(kv_format: KvFormat, num_tokens: int) -> int:
    values = 2 * kv_format.num_layers * kv_format.num_kv_heads * kv_format.head_dim * num_tokens
    return values * ITEM_BYTES[kv_format.dtype]
