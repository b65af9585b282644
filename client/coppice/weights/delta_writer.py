"""Writer of deltas between two weights files, and the file kept as the base of the next delta.

coppice.weights.delta describes the format.
"""

import json
import os
import tempfile
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from coppice.weights.delta import (
    DIFFERENCE,
    FORMAT,
    LENGTH_BYTES,
    VALUE_BYTES,
    Lineage,
    encode_block,
    map_in_order,
)
from coppice.weights.image import write_safetensors
from coppice.weights.safetensors_index import (
    ByteSpan,
    SafetensorsFile,
    TensorEntry,
    block_spans,
    read_exactly,
    read_safetensors_index,
)
from coppice.weights.safetensors_writer import Tensor

MAX_DELTA_RATIO = 0.9
"""Largest size of a difference relative to its tensor; coding costs time on both sides."""


class NotComparable(ValueError):
    """The two weights files differ in more than tensor values, so no delta is possible."""


def write_delta(
    base: Path, new: Path, lineage: Lineage, target: Path
) -> Generator[None, None, int]:
    """Writes the delta between two weights files, one block per step; returns the delta's size.

    Raises NotComparable if the headers differ.
    """
    before, after = read_safetensors_index(base), read_safetensors_index(new)
    if before.head != after.head:
        raise NotComparable("the tensors differ in name, dtype, shape or order")
    header_room = _header_room(after)
    entries: dict[str, object] = {"__metadata__": _metadata(lineage)}
    with FileIO(base) as old, FileIO(new) as fresh, target.open("wb") as out:
        out.seek(8 + header_room)
        with closing(_differences(after, old, fresh)) as differences:
            for tensor in after.tensors.values():
                start = out.tell()
                code = yield from _write_change(tensor, differences, fresh, out)
                if code is not None:
                    entries[tensor.name] = _entry(tensor, code, start, out.tell(), 8 + header_room)
        num_bytes = out.tell()
        out.truncate()
        out.seek(0)
        out.write(_head(entries, header_room))
    return num_bytes


def _metadata(lineage: Lineage) -> dict[str, str]:
    return {"format": FORMAT, "base_sha256": lineage.base, "sha256": lineage.result}


def _header_room(file: SafetensorsFile) -> int:
    """Upper bound of the header size of any delta that results in this file.

    It is a multiple of 8 bytes.
    """
    longest: dict[str, object] = {"__metadata__": _metadata(Lineage("0" * 64, "0" * 64))}
    for tensor in file.tensors.values():
        numbers = {"shape": (*tensor.shape, tensor.num_bytes), "data_offsets": (tensor.end,) * 2}
        longest[tensor.name] = {"dtype": tensor.code + DIFFERENCE, **numbers}
    return len(_text(longest)) // 8 * 8 + 8


def _head(entries: dict[str, object], header_room: int) -> bytes:
    text = _text(entries)
    assert len(text) <= header_room, "the head outgrows its room"
    return header_room.to_bytes(8, "little") + text.ljust(header_room)


def _text(entries: dict[str, object]) -> bytes:
    return json.dumps(entries, separators=(",", ":")).encode()


def _entry(tensor: TensorEntry, code: str, start: int, end: int, base: int) -> dict[str, object]:
    shape = (end - start,) if code == DIFFERENCE else tensor.shape
    return {"dtype": code, "shape": shape, "data_offsets": (start - base, end - base)}


def _differences(
    file: SafetensorsFile, old: FileIO, fresh: FileIO
) -> Generator[bytes | None, None, None]:
    """Yields, for every block of every tensor, the encoded difference, or None if unchanged."""

    def difference(job: tuple[TensorEntry, ByteSpan]) -> bytes | None:
        tensor, span = job
        before, after = read_exactly(old, span), read_exactly(fresh, span)
        if before == after:
            return None
        item_bytes = VALUE_BYTES.get(tensor.code)
        return after if item_bytes is None else encode_block(before, after, item_bytes)

    jobs = ((tensor, span) for tensor in file.tensors.values() for span in block_spans(tensor))
    yield from map_in_order(difference, jobs)


def _write_change(
    tensor: TensorEntry, differences: Iterator[bytes | None], fresh: FileIO, out: BinaryIO
) -> Generator[None, None, str | None]:
    """Writes a tensor to a delta; returns its dtype there, or None if the tensor is unchanged."""
    start, unchanged = out.tell(), True
    for _ in block_spans(tensor):
        difference = next(differences)
        unchanged = unchanged and difference is None
        packed = difference or b""
        out.write(len(packed).to_bytes(LENGTH_BYTES, "little") + packed)
        yield
    if unchanged:
        out.seek(start)
        return None
    if tensor.code in VALUE_BYTES and out.tell() - start <= MAX_DELTA_RATIO * tensor.num_bytes:
        return DIFFERENCE
    out.seek(start)
    for span in block_spans(tensor):
        out.write(read_exactly(fresh, span))
        yield
    return tensor.code


class BaseFile:
    """Temporary weights file, the base of the next delta; deleted with the last reference to it.

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
        """Writes the delta from `base`; returns its size, or None if impossible or not smaller."""
        lineage = Lineage(base.digest.hex(), self.digest.hex())
        try:
            num_bytes = yield from write_delta(base.path, self.path, lineage, target)
        except NotComparable:
            return None
        return num_bytes if num_bytes < self.num_bytes else None
