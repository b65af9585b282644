"""What a killed engine leaves in shared memory, swept before the next one starts.

Only files of this user that no living process holds, with names that vLLM and its libraries give.
Files are told apart by device and inode: a semaphore is mapped under another name than it is left
with, and a small filesystem has the same small inodes as any other.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

Identity = tuple[int, int]
"""Of a file: its device, and its inode there."""

SHARED = Path("/dev/shm")
# One that is younger may belong to an engine that is about to map it.
MIN_AGE_SECONDS = 2.0
_LEFT_BEHIND = re.compile(r"^(psm_|vllm_dist_|sem\.mp-|__KMP_REGISTERED_LIB_)")


def sweep(folder: Path = SHARED) -> list[str]:
    """Removes the leftovers; returns their names."""
    stale = leftovers(folder)
    for file in stale:
        file.unlink(missing_ok=True)
    return sorted(file.name for file in stale)


def leftovers(folder: Path = SHARED) -> list[Path]:
    candidates = {file: identity(status) for file, status in _ours(folder)}
    if not candidates:
        return []
    held = set(held_files())
    return [file for file, identity in candidates.items() if identity not in held]


def _ours(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    if not folder.is_dir():
        return
    newest = time.time() - MIN_AGE_SECONDS
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            status = file.stat()
            if (
                _LEFT_BEHIND.match(file.name)
                and status.st_uid == os.getuid()
                and status.st_mtime < newest
            ):
                yield file, status


def held_files() -> Iterator[Identity]:
    """Every file that a living process maps or has open."""
    for process in Path("/proc").glob("[0-9]*"):
        yield from held_by(int(process.name))


def held_by(pid: int) -> Iterator[Identity]:
    process = Path("/proc", str(pid))
    yield from _mapped(process)
    yield from _open(process)


def _mapped(process: Path) -> list[Identity]:
    try:
        lines = (process / "maps").read_text().splitlines()
    except OSError:
        return []  # gone meanwhile, or another user's, whose files are not ours to sweep
    return [_mapped_identity(*line.split(maxsplit=5)[3:5]) for line in lines]


def _mapped_identity(device: str, inode: str) -> Identity:
    major, minor = (int(part, 16) for part in device.split(":"))
    return os.makedev(major, minor), int(inode)


def _open(process: Path) -> Iterator[Identity]:
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                yield identity(link.stat())


def identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino
