"""File of the last uploaded weights version, the base of the next delta."""

import os
import tempfile
import weakref
from collections.abc import Generator
from pathlib import Path

from coppice.weights.delta import Lineage
from coppice.weights.delta_writer import NotComparable, write_delta
from coppice.weights.tensor import Tensor
from coppice.weights.writer import write_safetensors


class BaseFile:
    """Owner of a temporary file, which is deleted with the last reference to this object.

    A concurrent upload that replaces the base file thus does not affect one that still reads it.
    """

    def __init__(self, version: str) -> None:
        descriptor, name = tempfile.mkstemp(prefix="coppice-", suffix=".safetensors")
        os.close(descriptor)
        self.version = version
        self.path = Path(name)
        self.digest = b""
        weakref.finalize(self, self.path.unlink, missing_ok=True)

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    def write(self, tensors: list[Tensor]) -> Generator[None, None, None]:
        self.digest = yield from write_safetensors(self.path, tensors)

    def write_delta(self, base: "BaseFile", target: Path) -> Generator[None, None, int | None]:
        """Writes the delta. Returns its size, or None if it is impossible or not smaller."""
        lineage = Lineage(base.digest.hex(), self.digest.hex())
        try:
            num_bytes = yield from write_delta(base.path, self.path, lineage, target)
        except NotComparable:
            return None
        return num_bytes if num_bytes < self.num_bytes else None
