"""Lossless difference of two tensors of equal shape and dtype, compact for small changes.

    difference   concatenated blocks, one per BLOCK_BYTES of the tensor
    block        4 bytes, little-endian: length of the rest; then a zlib stream of planes
    planes       the lowest byte of every value, then the next byte of every value, ...

Values are read as unsigned integers. Their difference is new minus old, modulo 2^16 or 2^32, so
there is no rounding. An optimizer step moves most values by at most one or two units in the last
place. Zigzag encoding maps 0, -1, 1, -2, ... to 0, 1, 2, 3, ..., so nearly all high bytes are zero.
deflate uses run-length encoding only (Z_RLE). This is faster and smaller than its match search,
which finds nothing in such data (docs/benchmarks.md).
"""

import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

BLOCK_BYTES: Final = 4 * 2**20
"""Bytes of the tensor per block; blocks are encoded and decoded independently."""

WORDS: Final[dict[int, npt.DTypeLike]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""Unsigned integer type by item size in bytes."""

LENGTH_BYTES: Final = 4

Bytes = bytes | memoryview


class DifferenceError(ValueError):
    """The bytes are not a valid difference for this tensor."""


def encode_block(old: Bytes, new: Bytes, item_bytes: int) -> bytes:
    word = WORDS[item_bytes]
    moved = np.frombuffer(new, word) - np.frombuffer(old, word)
    folded = (moved << 1) ^ -(moved >> 8 * item_bytes - 1)
    planes = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, item_bytes).T)
    stream = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    return stream.compress(planes.data) + stream.flush()


def decode_block(old: Bytes, packed: Bytes, item_bytes: int) -> npt.NDArray[np.uint8]:
    """Returns the new bytes. Never decompresses more than the size of `old`."""
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
        raise DifferenceError("a block is damaged") from error
    if len(planes) != num_bytes or rest or not stream.eof or stream.unused_data:
        raise DifferenceError("a block is of another length")
    return planes
