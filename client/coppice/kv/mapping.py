"""A handle's file in shared memory, mapped where it lies: no byte of it is copied.

Nothing pins what is read here, so the lease must run for as long as the bytes are in use, and the
checksums are what shows that it did.
"""

import mmap
import os
import stat
from pathlib import Path

from coppice.wire.kv import KvHandle, KvLocator

PREFIX = "coppice-kv-"


def mapped(handle: KvHandle, locator: KvLocator) -> memoryview | None:
    """Read-only; None where it cannot be had: on another host, or of another user."""
    if locator.path is None or locator.offset is None:
        return None
    path = Path(locator.path)
    if not path.name.startswith(PREFIX):
        return None  # a server must not make its callers open anything else
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _mapped(file, locator.offset, handle.num_bytes)
    finally:
        os.close(file)


def _mapped(file: int, offset: int, num_bytes: int) -> memoryview | None:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or offset + num_bytes > status.st_size:
        return None
    begin = offset - offset % mmap.ALLOCATIONGRANULARITY
    pages = mmap.mmap(file, offset + num_bytes - begin, offset=begin, access=mmap.ACCESS_READ)
    return memoryview(pages)[offset - begin :]
