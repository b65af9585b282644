"""Where a safetensors file has its tensors."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from coppice.wire.difference import BLOCK_BYTES

LENGTH_BYTES = 8  # of the header's length, which begins a safetensors file
MAX_HEADER_BYTES = 100_000_000  # as much as safetensors allows


class ByteSpan(NamedTuple):
    """Bytes start to end (end excluded) of a file."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor, and its bytes in the file."""

    name: str
    code: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsFile:
    """`head`: everything before the first tensor. Tensors follow it without a gap, in order."""

    path: Path
    head: bytes
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]


def read_safetensors_index(path: Path) -> SafetensorsFile:
    """ValueError for what is no whole safetensors file: the library looks for gaps and overlaps."""
    head = read_head(path)
    entries = json.loads(head[LENGTH_BYTES:])
    metadata = entries.pop("__metadata__", {})
    tensors = [
        TensorEntry(
            name=name,
            code=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=len(head) + entry["data_offsets"][0],
            end=len(head) + entry["data_offsets"][1],
        )
        for name, entry in entries.items()
    ]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    return SafetensorsFile(
        path=path, head=head, metadata=metadata, tensors={t.name: t for t in tensors}
    )


def read_head(path: Path) -> bytes:
    """Everything before the first tensor of a whole file; ValueError for one that is not."""
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(LENGTH_BYTES)
        head = prefix + file.read(min(int.from_bytes(prefix, "little"), MAX_HEADER_BYTES))
    try:
        _check_format(head, num_bytes)
    except SafetensorError as error:
        raise ValueError(f"{path.name} is no whole safetensors file: {error}") from error
    return head


def _check_format(head: bytes, num_bytes: int) -> None:
    """The library maps what it opens, and a mapping of a file that another process cuts is a
    SIGBUS. It is given a sparse copy of the same size that nobody else can reach."""
    with TemporaryFile() as copy:
        copy.write(head)
        copy.truncate(num_bytes)  # flushes
        with safe_open(f"/dev/fd/{copy.fileno()}", framework="numpy"):
            pass


def block_spans(tensor: TensorEntry) -> Iterator[ByteSpan]:
    """Its bytes, in stretches of BLOCK_BYTES; the last may be shorter."""
    for start in range(tensor.start, tensor.end, BLOCK_BYTES):
        yield ByteSpan(start, min(start + BLOCK_BYTES, tensor.end))


def read_exactly(file: FileIO, span: ByteSpan) -> bytes:
    """From any thread: the file's own position plays no part. ValueError if it has been cut."""
    parts, at = [], span.start
    while at < span.end:
        part = os.pread(file.fileno(), span.end - at, at)
        if not part:
            raise ValueError("the file has become shorter")
        parts.append(part)
        at += len(part)
    return b"".join(parts)
