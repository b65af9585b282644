"""The exact difference of two tensors of one shape and type, small where values hardly moved.

    difference   blocks one after the other, one for every BLOCK_BYTES of the tensor
    block        4 bytes, little-endian: how many follow; then a zlib stream of planes
    planes       of every value the lowest byte, then of every value the next, ...

A value is the integer of its bits, and its difference is new minus old, modulo 2^16 or 2^32: no
rounding, whatever the floats are. An optimiser's step moves most values by one or two in the last
place, if at all. Folded, so that 0, -1, 1, -2, ... become 0, 1, 2, 3, ..., nearly all high bytes
are zero. Runs are all that deflate looks for here: that is faster and smaller than its search for
repetitions, which there are none of (docs/benchmarks.md).
"""

import zlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

BLOCK_BYTES: Final = 4 * 2**20
"""Of the tensor; a block is made, and taken apart, without its neighbours."""

WORDS: Final[dict[int, npt.DTypeLike]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
"""By the bytes of a value: what differences are made of."""

LENGTH_BYTES: Final = 4

Bytes = bytes | memoryview


class DifferenceError(ValueError):
    """These bytes are no difference to that tensor."""


def encode_block(old: Bytes, new: Bytes, item_bytes: int) -> bytes:
    word = WORDS[item_bytes]
    moved = np.frombuffer(new, word) - np.frombuffer(old, word)
    folded = (moved << 1) ^ -(moved >> 8 * item_bytes - 1)
    planes = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, item_bytes).T)
    stream = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    return stream.compress(planes.data) + stream.flush()


def decode_block(old: Bytes, packed: Bytes, item_bytes: int) -> npt.NDArray[np.uint8]:
    """What `new` was. Never unpacks more than there is of `old`."""
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
        rest = stream.decompress(stream.unconsumed_tail, 1)  # the end, if this is it
    except zlib.error as error:
        raise DifferenceError("a block is damaged") from error
    if len(planes) != num_bytes or rest or not stream.eof or stream.unused_data:
        raise DifferenceError("a block is of another length")
    return planes
