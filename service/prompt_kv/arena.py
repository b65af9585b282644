"""The shared memory that prompt KV lies in: one file, allocated whole, of a random name.

The engine's workers write into it, this process reads it, and so may a trainer of the same user on
the same host. A sparse file that outgrew its mount would kill whoever touches it, so every page is
allocated at the start; where there is too little, the arena is smaller or there is none.
"""

import errno
import logging
import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine.runtime.file_lock import acquire_lock, try_acquire
from service.prompt_kv.allocator import PAGE_BYTES

PREFIX = "coppice-kv-"
MIN_BYTES = 2**20
# vLLM's own queues and whatever else runs here need room in the same mount.
MAX_FREE_SHARE = 0.5

log = logging.getLogger(__name__)

FreeBytes = Callable[[Path], int]


def free_bytes(directory: Path) -> int:
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


class Arena:
    """Owns its file: made by `create`, gone after `close`.

    The file is locked for as long as it is owned, so that the next server of this directory can
    tell what a killed one has left.
    """

    def __init__(self, path: Path, file: int, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._file = file
        self.view = memoryview(mmap.mmap(file, num_bytes))

    @classmethod
    def create(
        cls, directory: Path, wanted_bytes: int, *, get_free_bytes: FreeBytes = free_bytes
    ) -> "Arena | None":
        """As large as wanted, or as there is room for; None where that is next to nothing."""
        remove_stale_arenas(directory)
        try:
            num_bytes = _round_down_to_pages(
                min(wanted_bytes, int(get_free_bytes(directory) * MAX_FREE_SHARE))
            )
            path, file = _create_file(directory)
        except OSError as error:
            log.warning("no shared memory for prompt KV: %s", error.strerror)
            return None
        num_bytes = _allocate(file, num_bytes)
        if num_bytes < MIN_BYTES:
            log.warning("too little shared memory for prompt KV")
            os.close(file)
            path.unlink()
            return None
        if num_bytes < _round_down_to_pages(wanted_bytes):
            log.warning("prompt KV has %d bytes of shared memory, not all it may have", num_bytes)
        return cls(path, file, num_bytes)

    def close(self) -> None:
        """A trainer that has the file mapped keeps its pages; nobody new can reach them."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)  # the map goes with its last view


def remove_stale_arenas(directory: Path) -> list[str]:
    """Removes the arenas of servers that are gone; returns their names."""
    swept = []
    for file in directory.glob(f"{PREFIX}*"):
        with suppress(OSError), try_acquire(file) as is_left:  # or removed by its owner just now
            if is_left and file.stat().st_uid == os.getuid():
                file.unlink()
                swept.append(file.name)
    return swept


def _create_file(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / (PREFIX + secrets.token_hex(16))
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if acquire_lock(file):
            return path, file
        os.close(file)


def _allocate(file: int, num_bytes: int) -> int:
    """How much could be had: the mount may be shorter of room than it said."""
    while num_bytes >= MIN_BYTES:
        try:
            os.posix_fallocate(file, 0, num_bytes)
            return num_bytes
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                log.warning("shared memory cannot be allocated: %s", error.strerror)
                return 0
        os.ftruncate(file, 0)
        num_bytes = _round_down_to_pages(num_bytes // 2)
    return 0


def _round_down_to_pages(num_bytes: int) -> int:
    return num_bytes // PAGE_BYTES * PAGE_BYTES
