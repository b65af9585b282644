"""Temporary directory for files of the engine's processes, mainly sockets.

vLLM creates them in the system's temporary directory and does not remove them. This directory is
removed with its engine; the directory of a killed service is removed at the next start.
"""

import shutil
import tempfile
from pathlib import Path

from engine.runtime.file_lock import create_locked_dir

_PREFIX = "coppice-engine-"


class TempDir:
    """Owner of a new directory until `close`, which is idempotent."""

    def __init__(self) -> None:
        self.path, self._lock = create_locked_dir(_PREFIX, Path(tempfile.gettempdir()))

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
