"""Removal of shared memory that a killed engine left behind, before the next engine starts.

Removes only files of this user that no running process uses, with names that vLLM and its libraries
use. Files are identified by device and inode: a semaphore is mapped under a different name than the
one it keeps, and inode numbers repeat across filesystems.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FileId = tuple[int, int]
"""Device and inode number."""

SHM_DIR = Path("/dev/shm")
# A younger file may belong to an engine that is about to map it.
MIN_AGE_SECONDS = 2.0
_LEFTOVER_NAMES = re.compile(r"^(psm_|vllm_dist_|sem\.mp-|__KMP_REGISTERED_LIB_)")


def remove_leftovers(folder: Path = SHM_DIR) -> list[str]:
    """Remove leftover files and return their names."""
    stale = find_leftovers(folder)
    for file in stale:
        file.unlink(missing_ok=True)
    return sorted(file.name for file in stale)


def find_leftovers(folder: Path = SHM_DIR) -> list[Path]:
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
    """All files that a running process maps or has open."""
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
