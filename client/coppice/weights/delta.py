"""Format of weights deltas, and reconstruction of a weights file from a base file and a delta.

A delta is a safetensors file. Its metadata contains the SHA-256 of the base file and of the result,
which have byte-identical headers. Unchanged tensors are omitted. A changed tensor has an entry with
its name: the whole tensor or, with dtype U8, its difference if that is sufficiently shorter:

    difference   concatenated blocks, one per BLOCK_BYTES of the tensor
    block        4 bytes, little-endian: length of the rest; then a zlib stream of planes, or
                 nothing if the block is unchanged
    planes       the lowest byte of every value, then the next byte of every value, ...

Values are read as unsigned integers. Their difference is new minus old, modulo 2^16 or 2^32, so
there is no rounding. An optimizer step moves most values by at most one or two units in the last
place. Zigzag encoding maps 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., so nearly all high bytes are zero.
deflate uses run-length encoding only (Z_RLE). This is faster and smaller than its match search,
which finds nothing in such data (docs/performance/benchmarks.md).
"""

import hashlib
import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from coppice.safetensors_io import (
    FLOAT_BYTES,
    ByteSpan,
    Header,
    TensorEntry,
    read_exactly,
    read_header,
)

T = TypeVar("T")
R = TypeVar("R")
NUM_THREADS = min(8, len(os.sched_getaffinity(0)))
BLOCK_BYTES = 4 * 2**20
"""Bytes of a tensor that are read, compared and written at a time."""
WORDS: Final[dict[int, npt.DTypeLike]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Unsigned integer type by item size in bytes."""
LENGTH_BYTES: Final = 4
Bytes = bytes | memoryview
FORMAT = "coppice-delta"
DIFFERENCE = "U8"
_SHA256 = re.compile(r"[0-9a-f]{64}")
BlockReader = Callable[[], bytes | memoryview]


def map_in_order(function: Callable[[T], R], jobs: Iterable[T]) -> Generator[R, None, None]:
    """Maps a function over jobs in threads; yields results in order, with bounded buffering.

    After the generator is closed, no thread is running.
    """
    futures: deque[Future[R]] = deque()
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights") as threads:
        try:
            for job in jobs:
                futures.append(threads.submit(function, job))
                if len(futures) > NUM_THREADS:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        finally:
            for future in futures:
                future.cancel()


class DifferenceError(ValueError):
    """The bytes are not a valid encoded difference for this tensor."""


def encode_block(old: Bytes, new: Bytes, item_bytes: int) -> bytes:
    word = WORDS[item_bytes]
    moved = np.frombuffer(new, word) - np.frombuffer(old, word)
    folded = (moved << 1) ^ -(moved >> 8 * item_bytes - 1)
    planes = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, item_bytes).T)
    stream = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    return stream.compress(planes.data) + stream.flush()


def decode_block(old: Bytes, packed: Bytes, item_bytes: int) -> npt.NDArray[np.uint8]:
    """Applies an encoded difference to one block of a tensor; returns the new bytes.

    Never decompresses more than the size of `old`.
    """
    word = WORDS[item_bytes]
    before = np.frombuffer(old, word)
    planes = np.frombuffer(_unpacked(packed, before.nbytes), np.uint8).reshape(item_bytes, -1)
    folded: npt.NDArray[Any] = np.ascontiguousarray(planes.T).view(word).reshape(-1)
    after: npt.NDArray[Any] = before + ((folded >> 1) ^ -(folded & 1))
    return after.view(np.uint8)


def _unpacked(packed: Bytes, num_bytes: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        planes = stream.decompress(packed, num_bytes)
        rest = stream.decompress(stream.unconsumed_tail, 1)  # consumes the end of the stream
    except zlib.error as error:
        raise DifferenceError("a block is corrupt") from error
    if len(planes) != num_bytes or rest or not stream.eof or stream.unused_data:
        raise DifferenceError("a block has the wrong length")
    return planes


class DeltaRefused(ValueError):
    """The file is not a weights delta, or not a delta of this base file.

    The message contains tensor names, but no file names.
    """


class Lineage(NamedTuple):
    """SHA-256, in hex, of a delta's base file and of the file that results from the delta."""

    base: str
    result: str


def lineage_of(delta: Path) -> Lineage:
    """Reads the SHA-256 of base and result from a delta. Raises DeltaRefused if one is missing."""
    metadata = _read_delta(delta).metadata
    lineage = Lineage(metadata.get("base_sha256", ""), metadata.get("sha256", ""))
    if not all(_SHA256.fullmatch(digest) for digest in lineage):
        raise DeltaRefused("its metadata lacks the SHA-256 of its base or of its result")
    return lineage


def apply_delta(base: Path, delta: Path, target: BinaryIO) -> str:
    """Applies a delta to its base file, writes the result to `target` and returns its SHA-256.

    The caller compares the SHA-256 with the delta's lineage.

    Raises DeltaRefused. `target` never becomes longer than the base.
    """
    before, change = read_header(base), _read_delta(delta)
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


def block_spans(tensor: TensorEntry) -> Iterator[ByteSpan]:
    """Splits the byte range of a tensor into blocks of BLOCK_BYTES; the last may be shorter."""
    for start in range(tensor.start, tensor.end, BLOCK_BYTES):
        yield ByteSpan(start, min(start + BLOCK_BYTES, tensor.end))


def _read_delta(delta: Path) -> Header:
    try:
        file = read_header(delta)
    except ValueError as error:
        raise DeltaRefused("it is not a valid safetensors file") from error
    if file.metadata.get("format") != FORMAT:
        raise DeltaRefused(f"its metadata lacks the format {FORMAT}")
    return file


def _check_tensors(base: Header, change: Header) -> None:
    for name, tensor in change.tensors.items():
        known = base.tensors.get(name)
        if known is None:
            raise DeltaRefused(f"its base has no tensor {name[:120]!a}")
        if not _is_whole(tensor, known) and not _is_difference(tensor, known):
            raise DeltaRefused(f"{name[:120]!a} has another dtype or shape in its base")


def _is_whole(tensor: TensorEntry, known: TensorEntry) -> bool:
    return (tensor.dtype, tensor.shape) == (known.dtype, known.shape)


def _is_difference(tensor: TensorEntry, known: TensorEntry) -> bool:
    return tensor.dtype == DIFFERENCE and known.dtype in FLOAT_BYTES


def _read_block(block: BlockReader) -> bytes | memoryview:
    return block()


def _block_readers(
    base: Header, change: Header, old: FileIO, changes: FileIO
) -> Iterator[BlockReader]:
    """Yields, for each block of the delta's result in order, a function that reads the block."""
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
            raise DeltaRefused(f"the difference of {tensor.name[:120]!a} is truncated")
        yield _decode_block(tensor, span, ByteSpan(start, at), old, changes)
    if at != changed.end:
        raise DeltaRefused(f"the difference of {tensor.name[:120]!a} has excess bytes")


def _decode_block(
    tensor: TensorEntry, span: ByteSpan, packed: ByteSpan, old: FileIO, changes: FileIO
) -> BlockReader:
    def decode() -> bytes | memoryview:
        before = read_exactly(old, span)
        if packed.start == packed.end:
            return before
        try:
            after = decode_block(before, read_exactly(changes, packed), FLOAT_BYTES[tensor.dtype])
        except DifferenceError as error:
            raise DeltaRefused(f"the difference of {tensor.name[:120]!a}: {error}") from error
        return after.data

    return decode
