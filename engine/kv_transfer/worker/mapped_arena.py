"""Bounds-checked memory maps of the shared-memory files that hold exported KV, for one worker.

A store to a page beyond the file, or to a hole of it on a full mount, raises SIGBUS, which no guard
catches and which ends every sample. So before every copy the file's size is checked and the pages
are allocated.

A worker with a GPU registers the arena with the driver, so that the GPU writes and reads it
directly. It registers a chunk at a time, when a slot in it is first used. Exports and loads have a
mapping each.

Dimensions of exported KV: L layers, 2 for keys and values, H heads, T tokens, D head_dim.
"""

import itertools
import logging
import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch

from engine.kv_transfer.cache_layout import CacheLayout
from engine.types.kv import ExportSlot, ExportStatus

ALIGNMENT: Final = 64
STATUS_BYTES: Final = 8
ARENA_CHUNK_BYTES: Final = 2**25
"""Unit in which an arena is registered with a GPU's driver."""

logger = logging.getLogger(__name__)


class ArenaError(Exception):
    """The region is outside the arena file, or the file is not a valid arena."""


class HostMemoryRegistry(Protocol):
    """Registration of host memory with the driver of a GPU."""

    def register(self, address: int, num_bytes: int) -> None:
        """Register page-aligned memory. Raises RuntimeError if the driver refuses."""

    def unregister(self, address: int) -> None:
        """Unregister memory after all work of the GPU that may use it."""


class MappedArena:
    """Memory mapping of an arena file until `close`, before which all views must be released.

    With a `registry`, `registered_parts` registers the memory that it is called for. After the
    driver's first refusal nothing more is registered.
    """

    def __init__(self, path: Path, registry: HostMemoryRegistry | None = None) -> None:
        self._registry = registry
        self._registered: dict[int, int] = {}
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ArenaError(f"the arena cannot be opened: {error.strerror}") from error
        try:
            self._map = mmap.mmap(self._file, 0)
        except (OSError, ValueError) as error:
            os.close(self._file)
            raise ArenaError(f"the arena cannot be mapped: {error}") from error

    def region(self, offset: int, num_bytes: int) -> torch.Tensor:
        """View of the arena as a uint8 CPU tensor, all of whose pages are allocated.

        Raises ArenaError if it exceeds the file, or if the mount is full.
        """
        self._check(offset, num_bytes, ALIGNMENT)
        chunks = range(offset // ARENA_CHUNK_BYTES, -(-(offset + num_bytes) // ARENA_CHUNK_BYTES))
        if not all(chunk in self._registered for chunk in chunks):
            self._allocate(offset, num_bytes)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=offset)

    def registered_parts(self, memory: torch.Tensor) -> list[torch.Tensor] | None:
        """Split contiguous bytes of the arena at the borders of registered chunks.

        A transfer must not cross such a border. Returns None if the memory is not registered.
        """
        start = memory.data_ptr() - self._address
        end = start + memory.numel()
        if not self.is_registered(start, len(memory)):
            return None
        first_border = (start // ARENA_CHUNK_BYTES + 1) * ARENA_CHUNK_BYTES
        borders = [
            0,
            *(at - start for at in range(first_border, end, ARENA_CHUNK_BYTES)),
            end - start,
        ]
        return [memory[a:b] for a, b in itertools.pairwise(borders)]

    def is_registered(self, offset: int, num_bytes: int) -> bool:
        """True if the memory is registered, which this call does if possible."""
        chunks = range(offset // ARENA_CHUNK_BYTES, -(-(offset + num_bytes) // ARENA_CHUNK_BYTES))
        return all(self._register(chunk) for chunk in chunks)

    def write_status(self, offset: int, status: ExportStatus) -> None:
        """Write an export's status by a system call, which may fail but cannot crash the process.

        It is visible only after all earlier stores.
        """
        self._check(offset, STATUS_BYTES, STATUS_BYTES)
        os.pwrite(self._file, status.to_bytes(STATUS_BYTES, "little"), offset)

    def close(self) -> None:
        self._unregister()
        self._map.close()
        os.close(self._file)

    @property
    def _address(self) -> int:
        return torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()

    def _allocate(self, offset: int, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self._file, offset, num_bytes)
        except OSError as error:
            raise ArenaError(f"the region cannot be allocated: {error.strerror}") from error

    def _register(self, chunk: int) -> bool:
        """Register a chunk of the arena; returns whether it is registered."""
        if self._registry is None or chunk in self._registered:
            return chunk in self._registered
        offset = chunk * ARENA_CHUNK_BYTES
        num_bytes = min(ARENA_CHUNK_BYTES, len(self._map) - offset)
        try:
            self._allocate(offset, num_bytes)  # the driver locks pages, which must exist
            self._registry.register(self._address + offset, num_bytes)
        except ArenaError:
            return False  # the mount has room for the slot, but not for the chunk
        except RuntimeError as error:
            logger.warning("prompt KV is copied twice: %s", error)
            self._unregister()
            self._registry = None
            return False
        self._registered[chunk] = self._address + offset
        return True

    def _unregister(self) -> None:
        while self._registered and self._registry is not None:
            _, address = self._registered.popitem()
            self._registry.unregister(address)

    def _check(self, offset: int, num_bytes: int, alignment: int) -> None:
        status = os.fstat(self._file)
        end = offset + num_bytes
        if offset < 0 or offset % alignment or num_bytes <= 0:
            raise ArenaError(f"{num_bytes} bytes at offset {offset} are not a valid region")
        if end > min(len(self._map), status.st_size):
            raise ArenaError(f"the region ends at {end}, the arena at {status.st_size}")


class Arenas:
    """Arenas that a worker has mapped, by path. Raises ArenaError for a slot outside its arena.

    Statuses can be written by any thread; all else is called by one thread at a time.
    """

    def __init__(self, layout: CacheLayout, registry: HostMemoryRegistry | None = None) -> None:
        self._layout, self._registry = layout, registry
        self._lock = threading.Lock()
        self._arenas: dict[Path, MappedArena] = {}

    def kv(self, slot: ExportSlot) -> torch.Tensor:
        """View of a slot's KV in the arena, [L, 2, H, T, D], with the heads of all ranks."""
        layout, arena = self._layout, self._arena(slot.arena)
        region = arena.region(slot.offset, layout.num_bytes(slot.num_tokens))
        shape = (len(layout.layers), 2, layout.num_kv_heads, slot.num_tokens, layout.head_dim)
        return region.view(layout.dtype).view(shape)

    def registered_parts(self, slot: ExportSlot, memory: torch.Tensor) -> list[torch.Tensor] | None:
        """Parts of a slot's memory into which a GPU can copy directly; see MappedArena."""
        return self._arena(slot.arena).registered_parts(memory)

    def is_registered(self, slot: ExportSlot) -> bool:
        """True if a GPU can read a slot's memory directly; see MappedArena."""
        num_bytes = self._layout.num_bytes(slot.num_tokens)
        return self._arena(slot.arena).is_registered(slot.offset, num_bytes)

    def write_status(self, slot: ExportSlot, rank: int, status: ExportStatus) -> None:
        self._arena(slot.arena).write_status(slot.status_offset + STATUS_BYTES * rank, status)

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _arena(self, path: Path) -> MappedArena:
        with self._lock:
            if path not in self._arenas:
                self._arenas[path] = MappedArena(path, self._registry)
            return self._arenas[path]


@dataclass(frozen=True, slots=True)
class SlotTarget:
    """Memory that receives some heads of an exported prompt, [L, 2, H, T, D]."""

    arenas: Arenas
    slot: ExportSlot
    heads: range

    @property
    def num_tokens(self) -> int:
        return self.slot.num_tokens

    @property
    def gpu_offset(self) -> int | None:
        return self.slot.gpu_offset

    def open(self) -> torch.Tensor:
        """View of the memory, whose pages are allocated by this call. Raises ArenaError."""
        return self.arenas.kv(self.slot)[:, :, self.heads.start : self.heads.stop]

    def registered_parts(self, memory: torch.Tensor) -> list[torch.Tensor] | None:
        return self.arenas.registered_parts(self.slot, memory)
