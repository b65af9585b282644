"""Weights files that a client and a server both see, as on one host or a shared file system."""

import hashlib
from pathlib import Path


def fingerprint(path: Path) -> str:
    """Digest of the names, sizes and modification times of a file, or of a directory's weights.

    Raises OSError if a file is removed meanwhile.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    found = [(file.name, file.stat()) for file in files]
    lines = [f"{name} {status.st_size} {status.st_mtime_ns}\n" for name, status in found]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
