"""Maps the service's arenas (files for KV) in a worker, and checks bounds before each access.

A store to a page beyond the file, or to a hole of it on a full mount, raises SIGBUS, which no guard
catches and which ends every sample. So before every copy the file's size is checked and the pages
are allocated.

Dimensions of exported KV: L layers, 2 for keys and values, H heads, T tokens, D head_dim.
"""

import mmap
import os
from pathlib import Path
from typing import Final

import torch

from engine.kv_transfer.cache_layout import CacheLayout
from engine.kv_types import ExportSlot, ExportStatus

ALIGNMENT: Final = 64
STATUS_BYTES: Final = 8


class ArenaError(Exception):
    """The region is outside the arena file, or the file is not a valid arena."""


class MappedArena:
    """Memory mapping of an arena file until `close`, before which all views must be released."""

    def __init__(self, path: Path) -> None:
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
        try:
            os.posix_fallocate(self._file, offset, num_bytes)
        except OSError as error:
            raise ArenaError(f"the region cannot be allocated: {error.strerror}") from error
        return torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=offset)

    def write_status(self, offset: int, status: ExportStatus) -> None:
        """Write an export's status by a system call, which may fail but cannot crash the process.

        It is visible only after all earlier stores.
        """
        self._check(offset, STATUS_BYTES, STATUS_BYTES)
        os.pwrite(self._file, status.to_bytes(STATUS_BYTES, "little"), offset)

    def close(self) -> None:
        self._map.close()
        os.close(self._file)

    def _check(self, offset: int, num_bytes: int, alignment: int) -> None:
        status = os.fstat(self._file)
        end = offset + num_bytes
        if offset < 0 or offset % alignment or num_bytes <= 0:
            raise ArenaError(f"{num_bytes} bytes at offset {offset} are not a valid region")
        if end > min(len(self._map), status.st_size):
            raise ArenaError(f"the region ends at {end}, the arena at {status.st_size}")


class Arenas:
    """Arenas that a worker has mapped, by path. Raises ArenaError for a slot outside its arena."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._arenas: dict[Path, MappedArena] = {}

    def kv(self, slot: ExportSlot) -> torch.Tensor:
        """View of a slot's KV in the arena, [L, 2, H, T, D], with the heads of all ranks."""
        layout = self._layout
        region = self._arena(slot).region(slot.offset, layout.num_bytes(slot.num_tokens))
        shape = (len(layout.layers), 2, layout.num_kv_heads, slot.num_tokens, layout.head_dim)
        return region.view(layout.dtype).view(shape)

    def write_status(self, slot: ExportSlot, rank: int, status: ExportStatus) -> None:
        self._arena(slot).write_status(slot.status_offset + STATUS_BYTES * rank, status)

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()

    def _arena(self, slot: ExportSlot) -> MappedArena:
        if slot.arena not in self._arenas:
            self._arenas[slot.arena] = MappedArena(slot.arena)
        return self._arenas[slot.arena]
