"""The folder for what the engine's processes put into the file system: sockets above all.

vLLM puts them right into the system's folder for temporary files and leaves them there. Ours goes
with its engine; one whose service was killed is swept by the next.
"""

import shutil
import tempfile
from pathlib import Path

from engine.runtime.file_lock import create_locked_dir

_PREFIX = "coppice-engine-"


class TempDir:
    """Owns one fresh folder until `close`, which may be called again."""

    def __init__(self) -> None:
        self.path, self._lock = create_locked_dir(_PREFIX, Path(tempfile.gettempdir()))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
