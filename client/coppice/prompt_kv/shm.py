"""Prompt-KV files in shared memory, mapped without a copy.

Reading does not pin the memory, so the lease must not expire while the bytes are in use. Checksums
verify that it did not.
"""

import mmap
import os
import stat
import threading
from pathlib import Path

from coppice.wire.kv import KvHandle, KvLocator

PREFIX = "coppice-kv-"


class SharedMemoryMap:
    """Mapping of the latest arena.

    An arena is mapped once as a whole, so page faults occur once and not per handle. Memory that
    was handed out stays mapped while it is in use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: str | None = None
        self._arena: memoryview | None = None

    def get_file(self, handle: KvHandle, locator: KvLocator) -> memoryview | None:
        """Read-only memory, or None if it is on another host or belongs to another user."""
        if locator.path is None or locator.offset is None:
            return None
        with self._lock:
            if self._path != locator.path:
                self._path, self._arena = locator.path, _map_file(Path(locator.path))
            arena = self._arena
        end = locator.offset + handle.num_bytes
        if arena is None or end > len(arena):
            return None
        return arena[locator.offset : end]


def _map_file(path: Path) -> memoryview | None:
    if not path.name.startswith(PREFIX):
        return None  # a server must not make the client open arbitrary files
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return None
        return memoryview(mmap.mmap(file, status.st_size, access=mmap.ACCESS_READ))
    finally:
        os.close(file)
