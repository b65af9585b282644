"""The folder for what the engine's processes put into the file system: sockets above all.

vLLM puts them right into the system's folder for temporary files and leaves them there. Ours goes
with its engine; one whose service was killed is swept by the next.
"""

import fcntl
import shutil
import tempfile
from pathlib import Path

_PREFIX = "coppice-engine-"
_LOCK = ".owner"


class Scratch:
    """Owns one fresh folder until `close`, which may be called again."""

    def __init__(self) -> None:
        self._sweep()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = (self.path / _LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def _sweep(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            if _is_left(folder / _LOCK):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(lock: Path) -> bool:
    """A service holds its folder's lock for as long as it lives."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError, PermissionError):
        return False  # held; being made or removed just now; another user's
    return True
