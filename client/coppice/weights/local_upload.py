"""Weights that are handed to a server on the same host as a file in one of its directories.

The server names a directory of its own, and a token that a file in it contains. A client that finds
both is on the same host, or mounts the same volume. It writes the weights there, once, and the
server moves the file to its checkpoint store. So nothing is sent, and nothing is copied again.
"""

import ipaddress
import os
import secrets
import stat
from collections.abc import Generator, Iterable
from contextlib import closing
from pathlib import Path

import httpx

from coppice.transport.messages import Chunk
from coppice.wire.weights import LocalDirectory

TOKEN_FILE = ".token"


def is_loopback(base_url: str) -> bool:
    host = httpx.URL(base_url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_shared(directory: LocalDirectory) -> bool:
    """True if the server's directory is visible here, belongs to this user and has the token."""
    path = Path(directory.path)
    try:
        status = path.lstat()
        is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not (stat.S_ISDIR(status.st_mode) and is_private):
            return False
        return (path / TOKEN_FILE).read_text() == directory.token
    except (OSError, ValueError):  # none, or a NUL in the path
        return False


class LocalFile:
    """New file in the server's directory; `close` deletes it unless the server has moved it."""

    def __init__(self, directory: LocalDirectory) -> None:
        self.name = f"{secrets.token_hex(16)}.safetensors"
        self._path = Path(directory.path) / self.name

    def write(self, chunks: Iterable[Chunk]) -> Generator[None, None, None]:
        """Writes the file, one chunk per generator step; the server refuses it while it is open."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing(open(os.open(self._path, flags, 0o600), "wb", buffering=0)) as file:
            for chunk in chunks:
                rest = memoryview(chunk)
                while rest:
                    rest = rest[file.write(rest) :]
                yield

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
