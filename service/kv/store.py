"""Store of KV outside of the engine: states, pins and eviction of entries in shared memory.

    reserved       the engine may write the entry; nobody reads it
    committed      every rank has written it; it does not change any more
    quarantined    evicted: no longer found, but pinned, or kept for a grace period
    free           after quarantine

An entry begins with a pin of its writer. A writer or reader that may still be at work in the engine
is unpinned after a flush of the engine's exports, so no byte is reused while the engine can access
it. The engine sends no notification: every rank writes an `ExportStatus` word into the entry.

Two indexes find entries: `handles/` by handle and prompt, `spans/` by cache key. Each has a store
of its own, because the arena of handles is mapped by trainers and by NIXL, which must not read
spans, and because each has a size of its own.

Not thread-safe: all methods run on one event loop. The clock is monotonic.
"""

import asyncio
import math
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TypeVar

from coppice.safetensors_io import CODES, FLOAT_BYTES
from engine.errors import EngineError
from engine.protocol.prompt_kv import PromptKv
from engine.types.kv import ExportSlot, ExportStatus, KvFormat
from service.kv.arena import PAGE_BYTES, Arena, Extent, ExtentAllocator


class EntryState(Enum):
    RESERVED = "reserved"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """KV of one token sequence in the arena; its fields are changed only by `KvStore`.

    The engine writes it to `slot`. `gpu_extent` is its part of the ranks' GPU memory, if it has
    one. `ended` is set once `is_committed` is final. The entry is freed once it is evicted, has no
    pins, and `keep_until` has passed.
    """

    slot: ExportSlot
    extent: Extent
    gpu_extent: Extent | None = None
    pins: int = 1
    is_committed: bool = False
    is_evicted: bool = False
    keep_until: float = -math.inf
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> EntryState:
        if self.is_evicted:
            return EntryState.QUARANTINED
        return EntryState.COMMITTED if self.is_committed else EntryState.RESERVED


E = TypeVar("E", bound=Entry)


class KvStore:
    """Arena of shared memory and its entries; has no memory until `open`."""

    def __init__(self, engine: PromptKv, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._arena: Arena | None = None
        self.extents = ExtentAllocator(0)
        self.gpu_extents = ExtentAllocator(0)
        self._entries: set[Entry] = set()
        self._quarantined: set[Entry] = set()
        self._flushes: set[asyncio.Task[None]] = set()

    def open(
        self, directory: Path, num_bytes: int, *, preallocate: bool = False, gpu_bytes: int = 0
    ) -> bool:
        """Create the arena, see `Arena.create`; False if there is too little shared memory."""
        self._arena = Arena.create(directory, num_bytes, preallocate=preallocate)
        if self._arena is None:
            return False
        self.extents = ExtentAllocator(self._arena.num_bytes)
        self.gpu_extents = ExtentAllocator(gpu_bytes // PAGE_BYTES * PAGE_BYTES)
        self._words = struct.Struct(f"<{self._engine.info.tensor_parallel_size}Q")
        return True

    async def close(self) -> None:
        for task in self._flushes:
            task.cancel()
        await asyncio.gather(*self._flushes, return_exceptions=True)
        if self._arena is not None:
            self._arena.close()

    @property
    def arena(self) -> Arena:
        assert self._arena is not None, "the store is open"
        return self._arena

    def num_bytes(self, state: EntryState) -> int:
        return sum(entry.extent.num_bytes for entry in self._entries if entry.state is state)

    def reserve(
        self,
        create: Callable[..., E],
        num_tokens: int,
        num_bytes: int,
        *,
        header_bytes: int = 0,
        gpu_bytes: int = 0,
        name: str | None = None,
        evict_one: Callable[[], bool] = lambda: False,
    ) -> E | None:
        """Reserve an entry for `num_bytes` of KV behind a header, with a pin of its writer.

        Entries are evicted by `evict_one` until there is room; None if it returns False before.
        With `gpu_bytes` the entry also gets a part of the ranks' GPU memory, if there is space.
        """
        self.sweep()
        data_offset = PAGE_BYTES + header_bytes
        extent = self._allocate(data_offset + num_bytes, evict_one)
        if extent is None:
            return None
        data_offset += extent.start
        if not self.arena.back(extent.start, data_offset):
            self.extents.release(extent)
            return None
        self._words.pack_into(self.arena.view, extent.start, *[0] * (self._words.size // 8))
        gpu_extent = self.gpu_extents.allocate(gpu_bytes) if gpu_bytes else None
        slot = ExportSlot(
            arena=self.arena.path,
            offset=data_offset,
            status_offset=extent.start,
            num_tokens=num_tokens,
            name=name,
            gpu_offset=None if gpu_extent is None else gpu_extent.start,
        )
        entry = create(slot=slot, extent=extent, gpu_extent=gpu_extent)
        self._entries.add(entry)
        return entry

    def status(self, entry: Entry) -> ExportStatus:
        """Status of the write by all ranks; FAILED if any has failed."""
        words = self._words.unpack_from(self.arena.view, entry.slot.status_offset)
        for status in (ExportStatus.FAILED, ExportStatus.MIXED_VERSION):
            if status in words:
                return status
        is_committed = all(word == ExportStatus.COMMITTED for word in words)
        return ExportStatus.COMMITTED if is_committed else ExportStatus.PENDING

    def is_written(self, entry: Entry) -> bool:
        return self.status(entry) is ExportStatus.COMMITTED

    async def finish_write(self, entry: Entry) -> bool:
        """Return whether an entry is written, after its writing request has left the engine."""
        if not self.is_written(entry):
            await self._engine.flush_exports()
        return self.is_written(entry)

    def end_write(self, entry: Entry, *, is_committed: bool) -> None:
        """Record whether an entry has been written, and wake up those who wait for it."""
        entry.is_committed = is_committed
        entry.ended.set()

    def pin(self, entry: Entry) -> None:
        assert entry in self._entries, "a freed entry is not pinned"
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        assert entry.pins > 0, "unpinned more often than pinned"
        entry.pins -= 1
        self._free_if_unused(entry)

    def unpin_after_flush(self, entry: Entry) -> None:
        """Unpin an entry that the engine may still write or read on behalf of the caller."""
        task = asyncio.create_task(self._flush_and_unpin(entry))
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)

    def keep_for(self, entry: Entry, seconds: float) -> None:
        """Keep an entry for a while after its eviction, for reads that the server cannot see."""
        entry.keep_until = max(entry.keep_until, self._clock() + seconds)

    def evict(self, entry: Entry) -> None:
        """Quarantine an entry that its index no longer finds, until it can be freed."""
        entry.is_evicted = True
        self._quarantined.add(entry)
        self._free_if_unused(entry)

    def sweep(self) -> None:
        """Free the evicted entries whose grace period is over."""
        for entry in list(self._quarantined):
            self._free_if_unused(entry)

    def check(self) -> None:
        """Assert that every byte is free or belongs to one entry."""
        self.extents.check()
        self.gpu_extents.check()
        assert sorted(self.extents.taken) == sorted(entry.extent for entry in self._entries)
        on_gpu = sorted(entry.gpu_extent for entry in self._entries if entry.gpu_extent is not None)
        assert sorted(self.gpu_extents.taken) == on_gpu, "GPU memory leaks"
        assert self._quarantined == {entry for entry in self._entries if entry.is_evicted}

    def _allocate(self, num_bytes: int, evict_one: Callable[[], bool]) -> Extent | None:
        extent = self.extents.allocate(num_bytes)
        if num_bytes > self.extents.capacity_bytes:
            return None  # no eviction would make enough room
        while extent is None and evict_one():
            extent = self.extents.allocate(num_bytes)
        return extent

    async def _flush_and_unpin(self, entry: Entry) -> None:
        try:
            await self._engine.flush_exports()
        except EngineError:
            return  # the engine is gone, so the bytes are not needed again
        self.unpin(entry)

    def _free_if_unused(self, entry: Entry) -> None:
        if not entry.is_evicted or entry.pins or entry.keep_until > self._clock():
            return
        self._entries.remove(entry)
        self._quarantined.remove(entry)
        self.extents.release(entry.extent)
        if entry.gpu_extent is not None:
            self.gpu_extents.release(entry.gpu_extent)


def data_bytes(kv_format: KvFormat, num_tokens: int) -> int:
    """Bytes of the KV of a prompt's first `num_tokens` tokens, of all layers."""
    values = sum(
        2 * layer.num_kv_heads * layer.head_dim * (num_tokens - layer.first_token(num_tokens))
        for layer in map(kv_format.layer, range(kv_format.num_layers))
    )
    return values * FLOAT_BYTES[CODES[kv_format.dtype]]
