"""Writer of deltas between two weights files, and the file kept as the base of the next delta.

coppice.weights.delta describes the format.
"""

import os
import tempfile
import weakref
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from coppice.safetensors_io import (
    FLOAT_BYTES,
    ByteSpan,
    Header,
    TensorEntry,
    header_of,
    read_exactly,
    read_header,
)
from coppice.weights.delta import (
    DIFFERENCE,
    FORMAT,
    LENGTH_BYTES,
    Lineage,
    block_spans,
    encode_block,
    map_in_order,
)
from coppice.weights.tensor_serialization import Tensor, write_safetensors

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
    before, after = read_header(base), read_header(new)
    if before.head != after.head:
        raise NotComparable("the tensors differ in name, dtype, shape or order")
    head_room = _head_room(after)
    entries = list[TensorEntry]()
    with FileIO(base) as old, FileIO(new) as fresh, target.open("wb") as out:
        out.seek(head_room)
        with closing(_differences(after, old, fresh)) as differences:
            for tensor in after.tensors.values():
                start = out.tell()
                dtype = yield from _write_change(tensor, differences, fresh, out)
                if dtype is not None:
                    entries.append(_entry(tensor, dtype, start, out.tell()))
        num_bytes = out.tell()
        out.truncate()
        out.seek(0)
        head = header_of(entries, _metadata(lineage), min_bytes=head_room)
        assert len(head) == head_room, "the head outgrows its room"
        out.write(head)
    return num_bytes


def _metadata(lineage: Lineage) -> dict[str, str]:
    return {"format": FORMAT, "base_sha256": lineage.base, "sha256": lineage.result}


def _head_room(file: Header) -> int:
    """Upper bound of the bytes before the first tensor of any delta that results in this file."""
    longest = [
        replace(tensor, dtype=tensor.dtype + DIFFERENCE, shape=(*tensor.shape, tensor.num_bytes))
        for tensor in file.tensors.values()
    ]
    return len(header_of(longest, _metadata(Lineage("0" * 64, "0" * 64))))


def _entry(tensor: TensorEntry, dtype: str, start: int, end: int) -> TensorEntry:
    shape = (end - start,) if dtype == DIFFERENCE else tensor.shape
    return TensorEntry(name=tensor.name, dtype=dtype, shape=shape, start=start, end=end)


def _differences(file: Header, old: FileIO, fresh: FileIO) -> Generator[bytes | None, None, None]:
    """Yields, for every block of every tensor, the encoded difference, or None if unchanged."""

    def difference(job: tuple[TensorEntry, ByteSpan]) -> bytes | None:
        tensor, span = job
        before, after = read_exactly(old, span), read_exactly(fresh, span)
        if before == after:
            return None
        item_bytes = FLOAT_BYTES.get(tensor.dtype)
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
    if tensor.dtype in FLOAT_BYTES and out.tell() - start <= MAX_DELTA_RATIO * tensor.num_bytes:
        return DIFFERENCE
    out.seek(start)
    for span in block_spans(tensor):
        out.write(read_exactly(fresh, span))
        yield
    return tensor.dtype


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
