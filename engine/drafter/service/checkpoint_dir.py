"""Directory on disk with the checkpoints of all drafter versions of one target model.

    <version>.safetensors    the drafter in use, and one in an A/B test or queued for it
    serving.json             the version in use
    start/                   the model directory that vLLM and the trainer start from
    training.safetensors     the trainer's checkpoint

A directory has one owner, which holds its lock. A second server of the same model uses a temporary
directory of its own, deleted on close. All writes are atomic.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from coppice.weights.checkpoint_files import SINGLE_FILE

INITIAL_VERSION: Final = "initial"
TRAINER_CHECKPOINT: Final = "training"
"""File stem of the trainer's checkpoint, which no version may have."""
_LOCK_FILE: Final = ".owner"
_SERVING_FILE: Final = "serving.json"


class DrafterDir:
    """Locked directory with the drafter versions of one target model.

    `write_initial` fills a model directory; it is called if no earlier run left a drafter.
    """

    def __init__(self, directory: Path, name: str, write_initial: Callable[[Path], None]) -> None:
        self._lock, self.path, self._is_temporary = _lock_dir(directory, name)
        self.start = self.path / "start"
        self._sweep()
        if self.serving is None:
            (self.start / SINGLE_FILE).unlink(missing_ok=True)  # a link whose target is gone
            write_initial(self.start)
            (self.start / SINGLE_FILE).rename(self.file(INITIAL_VERSION))
            self.set_serving(INITIAL_VERSION)
        self.update_start_link()

    def _sweep(self) -> None:
        """Delete incomplete and unused drafter files left by an earlier process that was killed."""
        serving = self.serving
        kept = {f"{TRAINER_CHECKPOINT}.safetensors"} | (
            {f"{serving}.safetensors"} if serving else set()
        )
        for file in (*self.path.glob("*.safetensors"), *self.path.glob("*.part")):
            if file.name not in kept:
                file.unlink()

    @property
    def serving(self) -> str | None:
        """Drafter version in use; None before there is any."""
        try:
            version = str(json.loads((self.path / _SERVING_FILE).read_text())["version"])
        except (OSError, ValueError, KeyError):
            return None
        return version if self.file(version).is_file() else None

    def file(self, version: str) -> Path:
        return self.path / f"{version}.safetensors"

    def import_file(self, source: Path) -> Path:
        """Move a drafter file into the directory under a temporary name.

        From another disk it is copied, which may take long.
        """
        handle, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=self.path)
        os.close(handle)
        part = Path(name)
        try:
            shutil.move(source, part)
        except BaseException:
            part.unlink()
            raise
        return part

    def assign_version(self, file: Path, version: str) -> None:
        """Rename an imported file to the file name of a drafter version."""
        file.replace(self.file(version))

    def set_serving(self, version: str) -> None:
        """Persist the drafter version in use, which the next start also uses."""
        part = self.path / f".{_SERVING_FILE}"
        part.write_text(json.dumps({"version": version}) + "\n")
        part.replace(self.path / _SERVING_FILE)

    def delete(self, version: str) -> None:
        self.file(version).unlink(missing_ok=True)

    def update_start_link(self) -> None:
        """Link the weights in the `start` directory to the drafter version in use."""
        serving = self.serving
        assert serving is not None, "set when the directory was opened"
        part = self.start / ".part"
        part.unlink(missing_ok=True)
        part.symlink_to(self.file(serving))
        part.replace(self.start / SINGLE_FILE)

    def close(self) -> None:
        self._lock.close()
        if self._is_temporary:
            shutil.rmtree(self.path, ignore_errors=True)


def _lock_dir(directory: Path, name: str) -> tuple[BinaryIO, Path, bool]:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    lock = _try_lock(path)
    if lock is not None:
        return lock, path, False
    path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=directory))
    lock = _try_lock(path)
    assert lock is not None, "the lock of a new directory is free"
    return lock, path, True


def _try_lock(path: Path) -> BinaryIO | None:
    path.mkdir(exist_ok=True)
    lock = (path / _LOCK_FILE).open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock
