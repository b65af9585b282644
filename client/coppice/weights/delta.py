"""Delta between two weights files, and its application.

A delta is a safetensors file. Its metadata contains the SHA-256 of the base file and of the result,
which have byte-identical headers. Unchanged tensors are omitted. A changed tensor has an entry with
its name: the whole tensor or, with dtype U8, its difference if that is sufficiently shorter:

    difference   concatenated blocks, one per BLOCK_BYTES of the tensor
    block        4 bytes, little-endian: length of the rest; then coppice.wire.difference, or
                 nothing if the block is unchanged
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from coppice.weights.ordered_map import map_in_order
from coppice.weights.safetensors_index import (
    ByteSpan,
    SafetensorsFile,
    TensorEntry,
    block_spans,
    read_exactly,
    read_safetensors_index,
)
from coppice.wire.difference import LENGTH_BYTES, DifferenceError, decode_block

FORMAT = "coppice-delta"
DIFFERENCE = "U8"
VALUE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""Item sizes of the dtypes for which differences exist; these are the dtypes that can be served."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class DeltaRefused(ValueError):
    """Not a delta, or not for this base. The message contains tensor names, but no file names."""


class Lineage(NamedTuple):
    """SHA-256 of a delta's base file and of its result, in hex."""

    base: str
    result: str


def lineage_of(delta: Path) -> Lineage:
    """Reads the lineage from the metadata. Raises DeltaRefused if it is missing."""
    metadata = _read_delta(delta).metadata
    lineage = Lineage(metadata.get("base_sha256", ""), metadata.get("sha256", ""))
    if not all(_SHA256.fullmatch(digest) for digest in lineage):
        raise DeltaRefused("it does not name its base and its result by their SHA-256")
    return lineage


def apply_delta(base: Path, delta: Path, target: BinaryIO) -> str:
    """Writes the result and returns its SHA-256, which the caller compares with the lineage.

    Raises DeltaRefused. `target` never becomes longer than the base.
    """
    before, change = read_safetensors_index(base), _read_delta(delta)
    _check_tensors(before, change)
    digest = hashlib.sha256(before.head)
    target.write(before.head)
    with (
        FileIO(base) as old,
        FileIO(delta) as changes,
        closing(map_in_order(_read_block, _block_readers(before, change, old, changes))) as blocks,
    ):
        for block in blocks:
            digest.update(block)
            target.write(block)
    return digest.hexdigest()


def _read_delta(delta: Path) -> SafetensorsFile:
    try:
        file = read_safetensors_index(delta)
    except ValueError as error:
        raise DeltaRefused("it is no safetensors file") from error
    if file.metadata.get("format") != FORMAT:
        raise DeltaRefused(f"its metadata does not say format: {FORMAT}")
    return file


def _check_tensors(base: SafetensorsFile, change: SafetensorsFile) -> None:
    for name, tensor in change.tensors.items():
        known = base.tensors.get(name)
        if known is None:
            raise DeltaRefused(f"its base has no tensor {name[:120]!a}")
        if not _is_whole(tensor, known) and not _is_difference(tensor, known):
            raise DeltaRefused(f"{name[:120]!a} has another type or shape in its base")


def _is_whole(tensor: TensorEntry, known: TensorEntry) -> bool:
    return (tensor.code, tensor.shape) == (known.code, known.shape)


def _is_difference(tensor: TensorEntry, known: TensorEntry) -> bool:
    return tensor.code == DIFFERENCE and known.code in VALUE_BYTES


BlockReader = Callable[[], bytes | memoryview]


def _read_block(block: BlockReader) -> bytes | memoryview:
    return block()


def _block_readers(
    base: SafetensorsFile, change: SafetensorsFile, old: FileIO, changes: FileIO
) -> Iterator[BlockReader]:
    """Yields a reader per block of the result, in order."""
    for name, tensor in base.tensors.items():
        changed = change.tensors.get(name)
        if changed is None:
            yield from (_copy_block(old, span) for span in block_spans(tensor))
        elif _is_whole(changed, tensor):
            yield from (_copy_block(changes, span) for span in block_spans(changed))
        else:
            yield from _patched_blocks(tensor, changed, old, changes)


def _copy_block(file: FileIO, span: ByteSpan) -> BlockReader:
    return lambda: read_exactly(file, span)


def _patched_blocks(
    tensor: TensorEntry, changed: TensorEntry, old: FileIO, changes: FileIO
) -> Iterator[BlockReader]:
    at = changed.start
    for span in block_spans(tensor):
        start = at + LENGTH_BYTES
        if start <= changed.end:
            at = start + int.from_bytes(read_exactly(changes, ByteSpan(at, start)), "little")
        if start > changed.end or at > changed.end:
            raise DeltaRefused(f"the difference of {tensor.name[:120]!a} ends too early")
        yield _decode_block(tensor, span, ByteSpan(start, at), old, changes)
    if at != changed.end:
        raise DeltaRefused(f"the difference of {tensor.name[:120]!a} goes on after its end")


def _decode_block(
    tensor: TensorEntry, span: ByteSpan, packed: ByteSpan, old: FileIO, changes: FileIO
) -> BlockReader:
    def decode() -> bytes | memoryview:
        before = read_exactly(old, span)
        if packed.start == packed.end:
            return before
        try:
            after = decode_block(before, read_exactly(changes, packed), VALUE_BYTES[tensor.code])
        except DifferenceError as error:
            raise DeltaRefused(f"the difference of {tensor.name[:120]!a}: {error}") from error
        return after.data

    return decode
