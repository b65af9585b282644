"""SHA-256 of a file, sent as the digest of a request body."""

import hashlib
from collections.abc import Generator
from pathlib import Path

from coppice.transport.driver import CHUNK_BYTES


def sha256_of(path: Path) -> Generator[None, None, bytes]:
    """Computes the digest in steps of one chunk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            yield
    return digest.digest()
