"""Directory in which publishers on the same host hand weights files over.

A file is moved to the checkpoint store, without a copy. Before it is used, the server makes sure
that nobody can change it any more: it must be a regular file of the server's user, with one link,
and no process may have it open for writing. The kernel grants a read lease only on such a file.
After the move its name is in a directory that only this user can read.
"""

import fcntl
import logging
import os
import secrets
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coppice.weights.local_upload import TOKEN_FILE
from coppice.wire.weights import LocalDirectory
from service.http.errors import BodyTooLarge, PathRefused

log = logging.getLogger(__name__)

ABANDONED_SECONDS = 60.0
"""Age after which a file that no process writes, and that nobody has published, is deleted."""


class LocalUploads:
    """Files that publishers write in a private directory below `root`; blocking methods."""

    def __init__(self, root: Path, *, has_leases: Callable[[Path], bool] | None = None) -> None:
        self._path = Path(tempfile.mkdtemp(prefix="local-", dir=root))  # mode 0700
        self._token = secrets.token_hex(16)
        (self._path / TOKEN_FILE).write_text(self._token)
        self._can_seal = (has_leases or _has_leases)(self._path / TOKEN_FILE)

    @property
    def directory(self) -> LocalDirectory | None:
        """The directory; None if its file system has no leases, so that every file is refused."""
        if not self._can_seal:
            return None
        return LocalDirectory(path=str(self._path.absolute()), token=self._token)

    def take(self, name: str, target: Path, *, max_bytes: int) -> int:
        """Move a complete file to `target` and seal it; returns its size.

        Raises PathRefused unless it can no longer be changed by anybody.
        """
        try:
            return self._take(name, target, max_bytes)
        finally:
            self.delete_abandoned()

    def _take(self, name: str, target: Path, max_bytes: int) -> int:
        try:
            if not stat.S_ISREG((self._path / name).lstat().st_mode):
                raise PathRefused("the local file is not a regular file")
            (self._path / name).rename(target)
        except OSError as error:
            raise PathRefused("no such file in the local directory") from error
        try:
            return _seal(target, max_bytes)
        except BaseException:
            target.unlink()
            raise

    def delete_abandoned(self) -> None:
        """Delete files of publishers that ended before the server took them.

        Ages are relative to the file system's time, which on a network is another host's.
        """
        token_file = self._path / TOKEN_FILE
        with suppress(OSError):
            os.utime(token_file)
            oldest = token_file.stat().st_mtime - ABANDONED_SECONDS
            for path in self._path.glob("*.safetensors"):
                _delete_if_abandoned(path, oldest)


def _has_leases(path: Path) -> bool:
    try:
        with _open(path) as file:
            _check_no_writer(file)
    except PathRefused as error:
        log.info("weights cannot be handed over in %s: %s", path.parent, error)
        return False
    return True


def _delete_if_abandoned(path: Path, oldest: float) -> None:
    with suppress(OSError, PathRefused):
        if path.lstat().st_mtime < oldest:
            with _open(path) as file:
                _check_no_writer(file)
            path.unlink()


def _seal(path: Path, max_bytes: int) -> int:
    with _open(path) as file:
        status = os.fstat(file)
        if status.st_uid != os.geteuid() or status.st_nlink != 1:
            raise PathRefused("the local file belongs to another user or has several links")
        if status.st_size > max_bytes:
            raise BodyTooLarge(f"the file exceeds the limit of {max_bytes} bytes")
        os.fchmod(file, 0o400)
        _check_no_writer(file)
    return status.st_size


@contextmanager
def _open(path: Path) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise PathRefused("the local file cannot be read") from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise PathRefused("the local file is not a regular file")
        yield file
    finally:
        os.close(file)


def _check_no_writer(file: int) -> None:
    """Raise PathRefused if a process has the file open, or mapped, for writing."""
    try:
        # The signal of a lease that is broken; the default one, SIGIO, would end the process.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        raise PathRefused("the local file is open for writing, or cannot be leased") from error
