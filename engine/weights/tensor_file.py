"""Location of a tensor in a safetensors file, and reading of its bytes.

Files are read, never mapped. A file that is truncated while mapped kills the process with SIGBUS,
while a short read can be handled.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

from engine.errors import CheckpointRefused

DTYPE_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4}  # dtypes that can be served
CHUNK_BYTES: Final = 2**19  # stays in a core's cache between reading and checking
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
    """Read the tensor's bytes into `buffer`, which has the tensor's size."""
    with _open_at_tensor(tensor) as stream:
        _read_exactly(buffer, stream, tensor)


def read_chunks(tensor: StoredTensor) -> Iterator[memoryview]:
    """The tensor's bytes in order. All chunks share one buffer, so use each before the next."""
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
    """Escape a name from an untrusted file for messages."""
    return name[:MAX_PRINTED_CHARACTERS].encode("unicode_escape").decode("ascii")
