"""Shared-memory arena for prompt KV: one preallocated file with a random name.

The engine's workers write to the arena. This process reads it, and a trainer of the same user on
the same host may map it as well. Touching a page of a sparse file on a full mount raises SIGBUS,
so every page is allocated at the start. If the mount has too little space, the arena is smaller or
is not created.
"""

import errno
import logging
import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine.runtime.file_ownership import acquire_lock, try_acquire
from service.prompt_kv.allocator import PAGE_BYTES

PREFIX = "coppice-kv-"
MIN_BYTES = 2**20
# vLLM's shared-memory queues and other processes need space in the same mount.
MAX_FREE_SHARE = 0.5

log = logging.getLogger(__name__)

FreeBytes = Callable[[Path], int]


def free_bytes(directory: Path) -> int:
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


class Arena:
    """Owner of the arena file, which `create` makes and `close` unlinks.

    The file stays locked while it is owned. A server that starts later in the same directory can
    therefore recognize the unlocked file of a killed server and remove it.
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
        """Create an arena of `wanted_bytes`, or of what the mount has space for.

        Returns None if less than `MIN_BYTES` can be allocated.
        """
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
            log.warning("prompt KV has only %d bytes of shared memory", num_bytes)
        return cls(path, file, num_bytes)

    def close(self) -> None:
        """Unlink the file. Trainers that have it mapped keep their pages; no new mappings."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)  # the mapping is released with its last memoryview


def remove_stale_arenas(directory: Path) -> list[str]:
    """Remove the arenas of dead servers and return their file names."""
    swept = []
    for file in directory.glob(f"{PREFIX}*"):
        with suppress(OSError), try_acquire(file) as is_left:  # OSError: its owner removed it
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
    """Allocate up to `num_bytes` and return the size, which is halved while the mount is full.

    The mount can have less space than statvfs reported.
    """
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
