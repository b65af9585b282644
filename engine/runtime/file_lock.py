"""Whether who made a file or a folder still lives: it holds a lock there for as long as it does.

Between making and locking it anybody may take it for a leftover. So a sweep removes it while it
holds the lock itself, and whoever has locked looks whether it is still there.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_LOCK_FILE = ".owner"


def acquire_lock(file: int) -> bool:
    """Until the file is closed. False if it was swept away before."""
    fcntl.flock(file, fcntl.LOCK_EX)
    return os.fstat(file).st_nlink > 0


@contextmanager
def try_acquire(path: Path) -> Iterator[bool]:
    """Whether its owner is gone; if so, it has no other until this is left."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False  # being made or removed just now; another user's
        return
    try:
        yield _try_flock(file)
    finally:
        os.close(file)


def _try_flock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def create_locked_dir(prefix: str, parent: Path) -> tuple[Path, BinaryIO]:
    """A fresh one, the owner's for as long as the lock is open. Leftovers of this prefix go."""
    _remove_abandoned_dirs(prefix, parent)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = (path / _LOCK_FILE).open("wb")
        if acquire_lock(lock.fileno()):
            return path, lock
        lock.close()


def _remove_abandoned_dirs(prefix: str, parent: Path) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with try_acquire(folder / _LOCK_FILE) as acquired:
            if acquired:
                shutil.rmtree(folder, ignore_errors=True)
