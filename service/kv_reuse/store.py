"""The keys and values of segments, in shared memory of their own, of bounded size.

Each is of one key, one salt, one name, one text and one activation: nothing else ever finds it. The
engine writes a segment once, alone, from position 0 on; chains place it. What was used longest ago
makes room, what is in use does not; then `spare`, which anchors answer, as they do `outdate`, when
what was kept for other weights goes. Bytes that the engine may still write or read are left alone
until it has settled.

Lives on one event loop.
"""

import asyncio
import logging
import struct
import uuid
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from coppice.wire.reuse import ReuseReason
from engine.errors import EngineError
from engine.kv_types import ExportSlot, ExportWord, KvFormat
from engine.protocol import Engine
from service.kv_reuse.cache_entry import Kept, Key
from service.kv_reuse.layout import Part
from service.kv_reuse.prefix_order import Scope, digest
from service.prompt_kv.allocator import PAGE_BYTES, Extents
from service.prompt_kv.arena import Arena, FreeBytes, free_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

log = logging.getLogger(__name__)


class SegmentStore:
    """`open` once the engine serves; `close` after the last group. `reason`: why it is no use."""

    def __init__(
        self,
        engine: Engine,
        *,
        directory: Path,
        capacity_bytes: int,
        epoch: Callable[[], int],
        free: FreeBytes = free_bytes,
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._epoch = epoch
        self._free = free
        self.reason: ReuseReason | None = "disabled"
        self.spare: Callable[[], bool] = lambda: False
        self.outdate: Callable[[], object] = lambda: None
        self._arena: Arena | None = None
        self._extents = Extents(0)
        self._segments: OrderedDict[Key, Kept] = OrderedDict()
        self._reaping: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Does not fail: without it prompts are computed."""
        if not self._capacity_bytes:
            return
        facts = self._engine.facts
        if facts.kv_format is None:
            self.reason = facts.kv_reason or "unsupported_cache"
            return
        if facts.kv_format.not_movable is not None:
            log.warning("segments cannot be moved: %s", facts.kv_format.not_movable)
            self.reason = "not_movable"
            return
        self._arena = Arena.create(self._directory, self._capacity_bytes, free=self._free)
        if self._arena is None:
            self.reason = "no_shm"
            return
        self._extents = Extents(self._arena.num_bytes)
        self._words = struct.Struct(f"<{facts.tensor_parallel_size}Q")
        self.reason = None

    async def close(self) -> None:
        for task in self._reaping:
            task.cancel()
        await asyncio.gather(*self._reaping, return_exceptions=True)
        if self._arena is not None:
            self._arena.close()

    @property
    def view(self) -> memoryview:
        assert self._arena is not None, "there is a store"
        return self._arena.view

    @property
    def epoch(self) -> int:
        return self._epoch()

    @property
    def form(self) -> KvFormat:
        assert self._engine.facts.kv_format is not None, "there is a store"
        return self._engine.facts.kv_format

    @property
    def num_bytes(self) -> int:
        """Taken, also by what is forgotten and still in use."""
        return self._extents.capacity_bytes - self._extents.free_bytes

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def segment(self, scope: Scope, part: Part) -> tuple[Kept, bool] | None:
        """Pinned, and whether the caller has to have it written; None if there is no room."""
        assert part.name is not None, "only named segments are kept"
        self._drop_stale()
        key = Key(scope, self._epoch(), part.name, digest(part))
        kept = self._segments.get(key)
        if kept is not None:
            self._segments.move_to_end(key)
            kept.pins += 1
            return kept, False
        kept = self.room(len(part.token_ids), key)
        if kept is None:
            return None
        self._drop_other_texts(key)
        self._segments[key] = kept
        return kept, True

    def room(self, num_tokens: int, key: Key) -> Kept | None:
        """Pinned and unwritten; None if there is no room that could be made."""
        assert self._arena is not None, "there is a store"
        num_bytes = PAGE_BYTES + _data_bytes(self.form, num_tokens)
        extent = self._extents.take(num_bytes)
        if extent is None and num_bytes > self._extents.capacity_bytes:
            return None  # nobody's segments would make room enough
        while extent is None and (self._evict_one() or self.spare()):
            extent = self._extents.take(num_bytes)
        if extent is None:
            return None
        self._words.pack_into(self._arena.view, extent.start, *[0] * (self._words.size // 8))
        slot = ExportSlot(
            arena=self._arena.path,
            offset=extent.start + PAGE_BYTES,
            words_offset=extent.start,
            num_tokens=num_tokens,
            name=uuid.uuid4().hex,
        )
        return Kept(slot=slot, extent=extent, key=key, pins=1)

    async def conclude(self, kept: Kept) -> bool:
        """Its writer has ended: whether it is written, for good."""
        if not self.is_committed(kept):
            await self._engine.settle_exports()
        kept.written = self.is_committed(kept)
        if not kept.written:
            self.forget(kept)
        kept.ended.set()
        return kept.written

    def abandon(self, kept: Kept) -> None:
        """Pinned by whoever was to have it written, and did not: whoever waits is told."""
        self.forget(kept)
        kept.ended.set()
        self.unpin(kept, settled=False)

    def unpin(self, kept: Kept, *, settled: bool) -> None:
        """`settled`: the engine neither writes nor reads it for the caller any more."""
        assert kept.pins > 0, "unpinned more often than pinned"
        if settled:
            self._let_go(kept)
            return
        task = asyncio.create_task(self._reap(kept))
        self._reaping.add(task)
        task.add_done_callback(self._reaping.discard)

    def check(self) -> None:
        """The books balance: of an idle server all that is taken are segments."""
        self._extents.check()
        assert all(key == kept.key for key, kept in self._segments.items())

    async def _reap(self, kept: Kept) -> None:
        try:
            await self._engine.settle_exports()
        except EngineError:
            return  # nobody will ever need the bytes
        self._let_go(kept)

    def _let_go(self, kept: Kept) -> None:
        kept.pins -= 1
        if not kept.pins and self._segments.get(kept.key) is not kept:
            self._extents.give_back(kept.extent)

    def is_committed(self, kept: Kept) -> bool:
        assert self._arena is not None
        words = self._words.unpack_from(self._arena.view, kept.slot.words_offset)
        return all(word == ExportWord.COMMITTED for word in words)

    def _drop_stale(self) -> None:
        epoch = self._epoch()
        for key in [key for key in self._segments if key.epoch != epoch]:
            self.forget(self._segments[key])
        self.outdate()

    def _drop_other_texts(self, key: Key) -> None:
        """Of its name, unless an anchor or a prompt under way has them."""
        for other in [k for k in self._segments if (k.scope, k.name) == (key.scope, key.name)]:
            if not self._segments[other].pins:
                self.forget(self._segments[other])

    def _evict_one(self) -> bool:
        unused = next((kept for kept in self._segments.values() if not kept.pins), None)
        if unused is not None:
            self.forget(unused)
        return unused is not None

    def forget(self, kept: Kept) -> None:
        """Nobody finds it any more; it is freed once nobody uses it."""
        if self._segments.get(kept.key) is not kept:
            return
        del self._segments[kept.key]
        if not kept.pins:
            self._extents.give_back(kept.extent)


def _data_bytes(form: KvFormat, num_tokens: int) -> int:
    values = 2 * form.num_layers * form.num_kv_heads * form.head_dim * num_tokens
    return values * ITEM_BYTES[form.dtype]
