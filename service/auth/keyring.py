"""Accepted API keys, reloaded when their file changes."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from service.auth.keys import ROLES, ApiKey, ApiKeyEntry, match_key, read_keys
from service.config.sources import SettingsError

CHECK_SECONDS = 1.0
LOCAL_KEY = ApiKey(name="local", roles=ROLES)

log = logging.getLogger(__name__)

_Signature = tuple[int, int, int] | None


class Keyring:
    """The accepted keys. Without a file every caller is accepted as `LOCAL_KEY`.

    The file is checked for changes when a key is looked up, at most once per CHECK_SECONDS. It is
    small and local, so it is read on the event loop. If a changed file is invalid, the previous
    keys stay valid.
    """

    def __init__(self, file: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._checked_at = clock()
        self._signature: _Signature = None if file is None else _signature(file)
        self._entries: tuple[ApiKeyEntry, ...] = () if file is None else read_keys(file)

    @property
    def accepts_anyone(self) -> bool:
        return self._file is None

    def find(self, secret: str) -> ApiKey | None:
        if self._file is not None and self._clock() - self._checked_at >= CHECK_SECONDS:
            self._checked_at = self._clock()
            self._reload_if_changed(self._file)
        return match_key(self._entries, secret)

    def _reload_if_changed(self, file: Path) -> None:
        """Read the file again if its signature changed.

        The signature is taken before the read, so that a change during the read is seen by the
        next check.
        """
        signature = _signature(file)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._entries = read_keys(file)
        except SettingsError as error:
            log.error("the keys file cannot be used, the previous keys stay valid: %s", error)
        else:
            log.info("keys reloaded", extra={"keys": [entry.name for entry in self._entries]})


def _signature(file: Path) -> _Signature:
    """Modification time, size and inode of the file; None if it cannot be read.

    Symbolic links are followed: Kubernetes updates a mounted secret by changing a link's target.
    """
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
