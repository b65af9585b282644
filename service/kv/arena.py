"""Shared-memory file for KV outside of the engine, and the allocator of its pages.

The engine's workers write to the arena. This process reads it, and a trainer of the same user on
the same host may map it as well; the file's name is random. The file is sparse, so that memory is
taken when something is exported, and then kept. Touching a page of a sparse file on a full mount
raises SIGBUS, so the writer allocates the pages first: this process by `back`, a worker for the KV
itself. If the mount has too little space, the arena is smaller or is not created.
"""

import errno
import logging
import mmap
import os
import secrets
from bisect import insort
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.runtime.leftover_files import acquire_lock, try_acquire

PAGE_BYTES = 4096
"""Granularity of allocations: that of mmap offsets, so that each slot can be mapped by itself."""
PREFIX = "coppice-kv-"
MIN_BYTES = 2**20
# vLLM's shared-memory queues and other processes need space in the same mount.
MAX_FREE_SHARE = 0.5
MAX_DEFAULT_BYTES = 8 * 2**30
MIN_DEFAULT_BYTES = 64 * 2**20
"""Smallest arena that is created without being asked for."""
FreeBytes = Callable[[Path], int]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """Half-open byte range [start, end) of an arena."""

    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


class ExtentAllocator:
    """First-fit allocator of whole pages of an arena. Every byte is either free or allocated."""

    def __init__(self, capacity_bytes: int) -> None:
        assert capacity_bytes % PAGE_BYTES == 0, "an arena is made of whole pages"
        self.capacity_bytes = capacity_bytes
        self._free = [Extent(0, capacity_bytes)] if capacity_bytes else []
        self.taken: set[Extent] = set()

    @property
    def free_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self._free)

    def allocate(self, num_bytes: int) -> Extent | None:
        """Allocate an extent of at least `num_bytes`, rounded up to whole pages.

        Returns None if no free extent is large enough. Because of fragmentation that can happen
        even if `free_bytes` is sufficient.
        """
        assert num_bytes > 0, "num_bytes must be positive"
        wanted = round_up_to_pages(num_bytes)
        for index, gap in enumerate(self._free):
            if gap.num_bytes >= wanted:
                taken = Extent(gap.start, gap.start + wanted)
                rest = [Extent(taken.end, gap.end)] if gap.end > taken.end else []
                self._free[index : index + 1] = rest
                self.taken.add(taken)
                return taken
        return None

    def release(self, extent: Extent) -> None:
        assert extent in self.taken, "the extent is not allocated"
        self.taken.remove(extent)
        insort(self._free, extent)
        first = self._free.index(extent)
        last = first
        if first and self._free[first - 1].end == extent.start:
            first -= 1
        if last + 1 < len(self._free) and self._free[last + 1].start == extent.end:
            last += 1
        self._free[first : last + 1] = [Extent(self._free[first].start, self._free[last].end)]

    def check(self) -> None:
        """Assert that extents cover the arena without overlap and free neighbors are merged."""
        end = 0
        for extent in sorted([*self._free, *self.taken]):
            assert extent.start == end < extent.end, "extents overlap or leave a hole"
            end = extent.end
        assert end == self.capacity_bytes, "extents do not reach the end"
        pairs = zip(self._free, self._free[1:], strict=False)
        assert all(left.end < right.start for left, right in pairs), "adjacent free extents"


def round_up_to_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def free_bytes(directory: Path) -> int:
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize


def default_arena_bytes(free: int) -> int:
    """Size of the arena if none is configured; 0 if the free space is too small for one."""
    num_bytes = min(_round_down_to_pages(int(free * MAX_FREE_SHARE)), MAX_DEFAULT_BYTES)
    return num_bytes if num_bytes >= MIN_DEFAULT_BYTES else 0


def default_capacity_bytes(directory: Path) -> int:
    """Default size of an arena in a directory; 0 if it lacks space or does not exist."""
    try:
        return default_arena_bytes(free_bytes(directory))
    except OSError:
        return 0


class Arena:
    """Memory-mapped arena file in shared memory, made by `create` and unlinked by `close`.

    The file stays locked while its server runs. A server that starts later in the same directory
    can therefore recognize the unlocked file of a killed server and remove it.
    """

    def __init__(self, path: Path, file: int, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._file = file
        self._map = mmap.mmap(file, num_bytes)
        self.view = memoryview(self._map)

    @classmethod
    def create(
        cls,
        directory: Path,
        wanted_bytes: int,
        *,
        get_free_bytes: FreeBytes = free_bytes,
        preallocate: bool = False,
    ) -> "Arena | None":
        """Create an arena of `wanted_bytes`, or a smaller one if the mount lacks space.

        `preallocate` takes all of its memory at once. Returns None if less than `MIN_BYTES` can be
        allocated.
        """
        remove_stale_arenas(directory)
        try:
            num_bytes = _round_down_to_pages(
                min(wanted_bytes, int(get_free_bytes(directory) * MAX_FREE_SHARE))
            )
            path, file = _create_file(directory)
        except OSError as error:
            log.warning("prompt KV is disabled: no shared memory: %s", error.strerror)
            return None
        num_bytes = _resize(file, num_bytes, preallocate=preallocate)
        if num_bytes < MIN_BYTES:
            log.warning("prompt KV is disabled: too little shared memory")
            os.close(file)
            path.unlink()
            return None
        if num_bytes < _round_down_to_pages(wanted_bytes):
            log.warning("prompt KV is limited to %d bytes of shared memory", num_bytes)
        return cls(path, file, num_bytes)

    def back(self, start: int, end: int) -> bool:
        """Allocate the pages of a byte range before it is written; False if the mount is full."""
        try:
            os.posix_fallocate(self._file, start, end - start)
        except OSError as error:
            log.warning("cannot allocate shared memory: %s", error.strerror)
            return False
        return True

    def close(self) -> None:
        """Unlink the arena file; trainers that have it mapped keep their pages."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)  # the mapping is released with its last memoryview


def remove_stale_arenas(directory: Path) -> list[str]:
    """Remove arena files that dead servers left in a directory, and return the files' names."""
    removed = []
    for file in directory.glob(f"{PREFIX}*"):
        with suppress(OSError), try_acquire(file) as is_stale:  # OSError: its owner removed it
            if is_stale and file.stat().st_uid == os.getuid():
                file.unlink()
                removed.append(file.name)
    return removed


def _create_file(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / (PREFIX + secrets.token_hex(16))
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if acquire_lock(file):
            return path, file
        os.close(file)


def _resize(file: int, num_bytes: int, *, preallocate: bool) -> int:
    """Set the size of a file, and allocate its first pages or all; returns the size, 0 on failure.

    The mount can have less space than statvfs reported: then `num_bytes` is halved.
    """
    while num_bytes >= MIN_BYTES:
        try:
            os.ftruncate(file, num_bytes)
            os.posix_fallocate(file, 0, num_bytes if preallocate else MIN_BYTES)
            return num_bytes
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                log.warning("cannot allocate shared memory: %s", error.strerror)
                return 0
        os.ftruncate(file, 0)
        num_bytes = _round_down_to_pages(num_bytes // 2)
    return 0


def _round_down_to_pages(num_bytes: int) -> int:
    return num_bytes // PAGE_BYTES * PAGE_BYTES
