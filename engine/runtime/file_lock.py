"""Locks that show whether the owner of a file or directory is alive.

The owner holds a lock for as long as it lives. Between creation and locking, a file may be mistaken
for a leftover. So cleanup removes it while holding the lock itself, and an owner that has locked a
file checks that it still exists.
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
    """Lock the file until it is closed. Returns false if it was removed before."""
    fcntl.flock(file, fcntl.LOCK_EX)
    return os.fstat(file).st_nlink > 0


@contextmanager
def try_acquire(path: Path) -> Iterator[bool]:
    """Yield true if the owner is gone; then the lock is held until the context exits."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        yield False  # being created or removed, or another user's
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
    """Create a directory, owned for as long as the lock is open.

    Removes abandoned ones of this prefix.
    """
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
