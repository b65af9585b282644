"""A worker's mapping of the service's arena, with bounds checks against the file's current size.

A store to a page beyond the file raises SIGBUS, which no guard catches and which kills every
sample. So before every copy the file's size and full allocation are checked.
"""

import mmap
import os
from pathlib import Path
from typing import Final

import torch

from engine.kv_types import ExportStatus

ALIGNMENT: Final = 64
STATUS_BYTES: Final = 8
STAT_BLOCK_BYTES: Final = 512  # the unit of st_blocks, see stat(2)


class ArenaError(Exception):
    """The region is outside the file, or the file is not a valid arena."""


class MappedArena:
    """Owner of a mapping of the file until `close`. Views must be released before."""

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
        """A uint8 CPU tensor over the file itself. Raises ArenaError if it exceeds the file."""
        self._check(offset, num_bytes, ALIGNMENT)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=num_bytes, offset=offset)

    def write_status(self, offset: int, status: ExportStatus) -> None:
        """Write a status by a system call, which can fail but not crash.

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
            raise ArenaError(f"{num_bytes} bytes at {offset} are no place in an arena")
        if end > min(len(self._map), status.st_size):
            raise ArenaError(f"the place ends at {end}, the arena at {status.st_size}")
        if status.st_blocks * STAT_BLOCK_BYTES < status.st_size:
            raise ArenaError("the arena is not fully allocated")
