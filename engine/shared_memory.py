"""What a killed engine leaves in shared memory, swept before the next one starts.

Only files of this user that no living process maps, with names that vLLM and its libraries give.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")
_LEFT_BEHIND = re.compile(r"^(psm_|vllm_dist_|sem\.mp-|__KMP_REGISTERED_LIB_|coppice-)")


def sweep(folder: Path = SHARED) -> list[str]:
    """Removes the leftovers; returns their names."""
    candidates = [f for f in _files(folder) if _LEFT_BEHIND.match(f.name)]
    if not candidates:
        return []
    mapped = set(_mapped(folder))
    stale = [f for f in candidates if f.name not in mapped and f.stat().st_uid == os.getuid()]
    for file in stale:
        file.unlink(missing_ok=True)
    return sorted(file.name for file in stale)


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []


def _mapped(folder: Path) -> Iterator[str]:
    """Names in the folder that a living process maps or holds open."""
    prefix = f"{folder}/"
    for process in Path("/proc").glob("[0-9]*"):
        for text in (*_maps(process), *_open_files(process)):
            _, found, name = text.partition(prefix)
            if found:
                yield name.split(" ", 1)[0]


def _maps(process: Path) -> list[str]:
    try:
        return (process / "maps").read_text().splitlines()
    except OSError:
        return []  # gone meanwhile, or another user's, whose files are not ours to sweep


def _open_files(process: Path) -> Iterator[str]:
    try:
        links = list((process / "fd").iterdir())
    except OSError:
        return
    for link in links:
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(link)
