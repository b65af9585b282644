"""Making a delta (coppice.weights.delta): what has changed from one weights file to another."""

import json
from collections.abc import Generator, Iterator
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from coppice.weights.delta import DIFFERENCE, FORMAT, VALUE_BYTES, Lineage
from coppice.weights.ordered_map import ahead
from coppice.weights.safetensors_index import (
    Span,
    Stored,
    StoredFile,
    read_exactly,
    read_stored,
    spans_of,
)
from coppice.wire.difference import LENGTH_BYTES, encode_block

WORTH = 0.9
"""A difference is sent if it is at most this share of its tensor: it costs time at both ends."""


class NoDelta(ValueError):
    """The two files differ in more than values."""


def write_delta(
    base: Path, new: Path, lineage: Lineage, target: Path
) -> Generator[None, None, int]:
    """In steps of one block; returns how long it is. NoDelta if the two differ in their heads."""
    before, after = read_stored(base), read_stored(new)
    if before.head != after.head:
        raise NoDelta("the tensors differ in name, type, shape or order")
    room = _room(after)
    entries: dict[str, object] = {"__metadata__": _metadata(lineage)}
    with FileIO(base) as old, FileIO(new) as fresh, target.open("wb") as out:
        out.seek(8 + room)
        with closing(_differences(after, old, fresh)) as differences:
            for tensor in after.tensors.values():
                start = out.tell()
                code = yield from _write_change(tensor, differences, fresh, out)
                if code is not None:
                    entries[tensor.name] = _entry(tensor, code, start, out.tell(), 8 + room)
        num_bytes = out.tell()
        out.truncate()
        out.seek(0)
        out.write(_head(entries, room))
    return num_bytes


def _metadata(lineage: Lineage) -> dict[str, str]:
    return {"format": FORMAT, "base_sha256": lineage.base, "sha256": lineage.result}


def _room(file: StoredFile) -> int:
    """For the head of any delta to it, in whole words of 8 bytes."""
    longest: dict[str, object] = {"__metadata__": _metadata(Lineage("0" * 64, "0" * 64))}
    for tensor in file.tensors.values():
        numbers = {"shape": (*tensor.shape, tensor.num_bytes), "data_offsets": (tensor.end,) * 2}
        longest[tensor.name] = {"dtype": tensor.code + DIFFERENCE, **numbers}
    return len(_text(longest)) // 8 * 8 + 8


def _head(entries: dict[str, object], room: int) -> bytes:
    text = _text(entries)
    assert len(text) <= room, "the head outgrows its room"
    return room.to_bytes(8, "little") + text.ljust(room)


def _text(entries: dict[str, object]) -> bytes:
    return json.dumps(entries, separators=(",", ":")).encode()


def _entry(tensor: Stored, code: str, start: int, end: int, base: int) -> dict[str, object]:
    shape = (end - start,) if code == DIFFERENCE else tensor.shape
    return {"dtype": code, "shape": shape, "data_offsets": (start - base, end - base)}


def _differences(
    file: StoredFile, old: FileIO, fresh: FileIO
) -> Generator[bytes | None, None, None]:
    """Of every block of every tensor in turn; none: it has not changed."""

    def difference(job: tuple[Stored, Span]) -> bytes | None:
        tensor, span = job
        before, after = read_exactly(old, span), read_exactly(fresh, span)
        if before == after:
            return None
        item_bytes = VALUE_BYTES.get(tensor.code)
        return after if item_bytes is None else encode_block(before, after, item_bytes)

    jobs = ((tensor, span) for tensor in file.tensors.values() for span in spans_of(tensor))
    yield from ahead(difference, jobs)


def _write_change(
    tensor: Stored, differences: Iterator[bytes | None], fresh: FileIO, out: BinaryIO
) -> Generator[None, None, str | None]:
    """The type that the tensor has in the delta; none: it is not in it, for nothing has changed."""
    start, unchanged = out.tell(), True
    for _ in spans_of(tensor):
        difference = next(differences)
        unchanged = unchanged and difference is None
        packed = difference or b""
        out.write(len(packed).to_bytes(LENGTH_BYTES, "little") + packed)
        yield
    if unchanged:
        out.seek(start)
        return None
    if tensor.code in VALUE_BYTES and out.tell() - start <= WORTH * tensor.num_bytes:
        return DIFFERENCE
    out.seek(start)
    for span in spans_of(tensor):
        out.write(read_exactly(fresh, span))
        yield
    return tensor.code
