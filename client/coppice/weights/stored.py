"""Where a safetensors file has its tensors."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from coppice.wire.difference import BLOCK_BYTES


class Span(NamedTuple):
    """Bytes start to end (end excluded) of a file."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
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
class StoredFile:
    """`head`: everything before the first tensor. Tensors follow it without a gap, in order."""

    path: Path
    head: bytes
    metadata: Mapping[str, str]
    tensors: Mapping[str, Stored]


def read_stored(path: Path) -> StoredFile:
    """ValueError for what is no whole safetensors file: the library looks for gaps and overlaps."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{path.name} is no whole safetensors file: {error}") from error
    with path.open("rb") as file:
        prefix = file.read(8)
        text = file.read(int.from_bytes(prefix, "little"))
    head = prefix + text
    entries = json.loads(text)
    metadata = entries.pop("__metadata__", {})
    tensors = [
        Stored(
            name=name,
            code=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=len(head) + entry["data_offsets"][0],
            end=len(head) + entry["data_offsets"][1],
        )
        for name, entry in entries.items()
    ]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    return StoredFile(path=path, head=head, metadata=metadata, tensors={t.name: t for t in tensors})


def spans_of(tensor: Stored) -> Iterator[Span]:
    """Its bytes, in stretches of BLOCK_BYTES; the last may be shorter."""
    for start in range(tensor.start, tensor.end, BLOCK_BYTES):
        yield Span(start, min(start + BLOCK_BYTES, tensor.end))


def read_exactly(file: FileIO, span: Span) -> bytes:
    """From any thread: the file's own position plays no part. ValueError if it has been cut."""
    parts, at = [], span.start
    while at < span.end:
        part = os.pread(file.fileno(), span.end - at, at)
        if not part:
            raise ValueError("the file has become shorter")
        parts.append(part)
        at += len(part)
    return b"".join(parts)
