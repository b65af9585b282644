"""A tensor in a safetensors file: where its bytes are, and how to read them.

Files are read, never mapped: a file that shrinks under a mapping kills the process with SIGBUS,
while a short read is an ordinary refusal.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from engine.errors import CheckpointRefused

DTYPE_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4}  # the types that can be served
CHUNK_BYTES: Final = 2**19  # stays in a core's cache between reading and looking
MAX_PRINTED_CHARACTERS: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Bytes `start` to `end` (end excluded) of `file`, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


def read_into(tensor: StoredTensor, buffer: memoryview) -> None:
    """Fill `buffer`, which is as long as the tensor, with its bytes."""
    with _open_at_tensor(tensor) as stream:
        _read_exactly(buffer, stream, tensor)


def read_chunks(tensor: StoredTensor) -> Iterator[memoryview]:
    """The tensor's bytes in order. One buffer serves every chunk: use each before the next."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, tensor.num_bytes)))
    with _open_at_tensor(tensor) as stream:
        for start in range(0, tensor.num_bytes, CHUNK_BYTES):
            chunk = buffer[: tensor.num_bytes - start]
            _read_exactly(chunk, stream, tensor)
            yield chunk


@contextmanager
def _open_at_tensor(tensor: StoredTensor) -> Iterator[FileIO]:
    try:
        with FileIO(tensor.file) as stream:
            stream.seek(tensor.start)
            yield stream
    except OSError as error:
        name = printable(tensor.file.name)
        raise CheckpointRefused(f"{name} cannot be read: {error.strerror}") from None


def _read_exactly(buffer: memoryview, stream: FileIO, tensor: StoredTensor) -> None:
    while buffer:
        num_read = stream.readinto(buffer)
        if not num_read:
            raise CheckpointRefused(
                f"{printable(tensor.file.name)} ends within {printable(tensor.name)}: "
                "it has changed since its header was read"
            )
        buffer = buffer[num_read:]


def printable(name: str) -> str:
    """A name out of a stranger's file, fit for a message."""
    return name[:MAX_PRINTED_CHARACTERS].encode("unicode_escape").decode("ascii")
