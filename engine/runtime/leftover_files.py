"""File locks of running processes, and removal of files left by killed ones.

An owner holds a file lock for as long as it lives. Between creation and locking, a file may be
mistaken for a leftover. So cleanup removes it while holding the lock itself, and an owner that has
locked a file checks that it still exists.

vLLM locks nothing in shared memory. There, files of this user with names that vLLM and its
libraries use are removed if no running process maps them or has them open. Files are identified by
device and inode: a semaphore is mapped under a different name than the one it keeps, and inode
numbers repeat across filesystems.
"""

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

LOCK_FILE = ".owner"
_TEMP_DIR_PREFIX = "coppice-engine-"
FileId = tuple[int, int]
"""Device and inode number."""
SHM_DIR = Path("/dev/shm")


# A younger file may belong to an engine that is about to map it.
MIN_AGE_SECONDS = 2.0
_LEFTOVER_NAMES = re.compile(r"^(psm_|vllm_dist_|sem\.mp-|__KMP_REGISTERED_LIB_)")


def acquire_lock(file: int) -> bool:
    """Lock an open file until it is closed. Returns false if it has been deleted meanwhile."""
    fcntl.flock(file, fcntl.LOCK_EX)
    return os.fstat(file).st_nlink > 0


@contextmanager
def try_acquire(path: Path) -> Iterator[bool]:
    """Yield whether the file's owner is gone; if so, hold its lock until the context exits."""
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
    """Create a directory that is owned for as long as the returned lock file is open.

    Abandoned directories with the same prefix are removed.
    """
    remove_abandoned_dirs(prefix, parent)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = (path / LOCK_FILE).open("wb")
        if acquire_lock(lock.fileno()):
            return path, lock
        lock.close()


def remove_abandoned_dirs(prefix: str, parent: Path) -> None:
    for folder in parent.glob(f"{prefix}*"):
        with try_acquire(folder / LOCK_FILE) as acquired:
            if acquired:
                shutil.rmtree(folder, ignore_errors=True)


class TempDir:
    """Temporary directory for files of the engine's processes, mainly sockets.

    vLLM creates them in the system's temporary directory and does not remove them. This directory
    is removed by `close`, which is idempotent, or at the next start if the service was killed.
    """

    def __init__(self) -> None:
        self.path, self._lock = create_locked_dir(_TEMP_DIR_PREFIX, Path(tempfile.gettempdir()))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_leftover_shared_memory(folder: Path = SHM_DIR) -> list[str]:
    """Remove shared memory that killed engines left behind. Returns the file names."""
    stale = find_leftover_shared_memory(folder)
    for file in stale:
        file.unlink(missing_ok=True)
    return sorted(file.name for file in stale)


def find_leftover_shared_memory(folder: Path = SHM_DIR) -> list[Path]:
    candidates = {file: file_id(status) for file, status in _candidates(folder)}
    if not candidates:
        return []
    in_use = set(files_in_use())
    return [file for file, identity in candidates.items() if identity not in in_use]


def _candidates(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    if not folder.is_dir():
        return
    max_mtime = time.time() - MIN_AGE_SECONDS
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            status = file.stat()
            if (
                _LEFTOVER_NAMES.match(file.name)
                and status.st_uid == os.getuid()
                and status.st_mtime < max_mtime
            ):
                yield file, status


def files_in_use() -> Iterator[FileId]:
    """Device and inode numbers of all files that running processes map or have open."""
    for process in Path("/proc").glob("[0-9]*"):
        yield from files_used_by(int(process.name))


def files_used_by(pid: int) -> Iterator[FileId]:
    process = Path("/proc", str(pid))
    yield from _mapped_files(process)
    yield from _open_files(process)


def _mapped_files(process: Path) -> list[FileId]:
    try:
        lines = (process / "maps").read_text().splitlines()
    except OSError:
        return []  # exited, or another user's, whose files are not candidates
    return [_parse_mapping(*line.split(maxsplit=5)[3:5]) for line in lines]


def _parse_mapping(device: str, inode: str) -> FileId:
    major, minor = (int(part, 16) for part in device.split(":"))
    return os.makedev(major, minor), int(inode)


def _open_files(process: Path) -> Iterator[FileId]:
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                yield file_id(link.stat())


def file_id(status: os.stat_result) -> FileId:
    return status.st_dev, status.st_ino
