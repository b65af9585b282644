"""Index of the tensors in a safetensors file, and the files of a checkpoint to upload."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

BLOCK_BYTES = 4 * 2**20
"""Bytes of a tensor that are read, compared and written at a time."""
LENGTH_BYTES = 8  # size of the header length at the start of the file
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
INDEX = "model.safetensors.index.json"


class ByteSpan(NamedTuple):
    """Byte range of a file, from start to end (exclusive)."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a safetensors file, with its byte range in the file."""

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
    """Parsed header of a safetensors file.

    `head` is everything before the first tensor; tensors follow without gaps.
    """

    path: Path
    head: bytes
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]


def read_safetensors_index(path: Path) -> SafetensorsFile:
    """Parses the header of a safetensors file. Raises ValueError if the file is invalid.

    A file is also invalid if it is truncated, or has gaps or overlaps.
    """
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
    """Reads a safetensors file up to its first tensor. Raises ValueError if it is invalid."""
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(LENGTH_BYTES)
        head = prefix + file.read(min(int.from_bytes(prefix, "little"), MAX_HEADER_BYTES))
    try:
        _check_format(head, num_bytes)
    except SafetensorError as error:
        raise ValueError(f"{path.name} is not a complete safetensors file: {error}") from error
    return head


def _check_format(head: bytes, num_bytes: int) -> None:
    """Validates a safetensors header with the safetensors library.

    The library maps the file, and a mapping of a file that another process truncates raises SIGBUS.
    It therefore receives a private sparse copy of the same size.
    """
    with TemporaryFile() as copy:
        copy.write(head)
        copy.truncate(num_bytes)  # flushes
        with safe_open(f"/dev/fd/{copy.fileno()}", framework="numpy"):
            pass


def block_spans(tensor: TensorEntry) -> Iterator[ByteSpan]:
    """Splits the byte range of a tensor into blocks of BLOCK_BYTES; the last may be shorter."""
    for start in range(tensor.start, tensor.end, BLOCK_BYTES):
        yield ByteSpan(start, min(start + BLOCK_BYTES, tensor.end))


def read_exactly(file: FileIO, span: ByteSpan) -> bytes:
    """Reads a byte range of a file with pread, so threads may share the file.

    Raises ValueError if the file was truncated.
    """
    parts, at = [], span.start
    while at < span.end:
        part = os.pread(file.fileno(), span.end - at, at)
        if not part:
            raise ValueError("the file was truncated while it was read")
        parts.append(part)
        at += len(part)
    return b"".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Files of a checkpoint: one safetensors file, or an index followed by its shards."""

    files: tuple[Path, ...]
    sharded: bool


def checkpoint_files(source: Path) -> Checkpoint:
    """Lists the files of a checkpoint; raises an exception if one is missing or incomplete."""
    index = source / INDEX
    if index.is_file():
        shards = _shards(index)
        files, tensors = (index, *shards), shards
    else:
        tensors = files = (_single_file(source),)
    for path in tensors:
        _check(path)
    return Checkpoint(files=files, sharded=index in files)


def _single_file(source: Path) -> Path:
    if not source.is_dir():
        return source
    found = sorted(source.glob("*.safetensors"))
    if len(found) != 1:
        raise ValueError(
            f"{source} has {len(found)} .safetensors files and no {INDEX}:"
            " expected one file, or an index of all"
        )
    return found[0]


def _shards(index: Path) -> tuple[Path, ...]:
    content: Any = json.loads(index.read_bytes())
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    names = sorted(set(weight_map.values()))
    if strange := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index} lists files outside of its directory: {strange}")
    return tuple(index.parent / name for name in names)


def _check(path: Path) -> None:
    """Raises FileNotFoundError or ValueError unless the file is a complete safetensors file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    read_head(path)
