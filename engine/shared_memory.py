"""What a killed engine leaves in shared memory, swept before the next one starts.

Only files of this user that no living process holds, with names that vLLM and its libraries give.
Files are told apart by inode: a semaphore is mapped under another name than it is left with.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
    candidates = {file: status.st_ino for file, status in _ours(folder)}
    if not candidates:
        return []
    held = set(_held_inodes())
    return [file for file, inode in candidates.items() if inode not in held]


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


def _held_inodes() -> Iterator[int]:
    """Of every file that a living process maps or has open, on any device: better one too many."""
    for process in Path("/proc").glob("[0-9]*"):
        yield from _mapped(process)
        yield from _open(process)


def _mapped(process: Path) -> list[int]:
    try:
        lines = (process / "maps").read_text().splitlines()
    except OSError:
        return []  # gone meanwhile, or another user's, whose files are not ours to sweep
    return [int(line.split(maxsplit=5)[4]) for line in lines]


def _open(process: Path) -> Iterator[int]:
    with suppress(OSError):
        for link in (process / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                yield link.stat().st_ino
