"""Byte encoding of a sampling support: the set of token ids a token was sampled from.

The first byte is the encoding, the rest its payload. Of the encodings, the shortest is used:

    0  all token ids of the vocabulary; no payload
    1  the token ids of the set
    2  the token ids that are not in the set
    3  bitmap, one bit per token id, least significant bit first

Token ids are ascending. Each is stored as its distance from the previous one, less one, as a
little-endian base-128 varint; the first as its distance from -1.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

ALL: Final = b"\x00"
IDS, COMPLEMENT, BITMAP = 1, 2, 3
Mask = NDArray[np.bool_]


def encode_mask(mask_v: Mask) -> bytes:
    """Encode a support given as one boolean per token id."""
    vocab_size, count = len(mask_v), int(np.count_nonzero(mask_v))
    if count == vocab_size:
        return ALL
    inside = count <= vocab_size - count
    listed = np.flatnonzero(mask_v if inside else ~mask_v)
    # Each id takes at least one byte.
    if len(listed) <= (vocab_size + 7) // 8:
        payload = encode_ids(listed)
        if len(payload) <= (vocab_size + 7) // 8:
            return bytes([IDS if inside else COMPLEMENT]) + payload
    return bytes([BITMAP]) + np.packbits(mask_v, bitorder="little").tobytes()


def encode_ids(ids: NDArray[Any]) -> bytes:
    """Encode ascending token ids as varints of their distances."""
    return encode_id_rows(ids, [len(ids)])[0]


def encode_id_rows(ids: NDArray[Any], ends: Sequence[int] | NDArray[Any]) -> list[bytes]:
    """Encode sets of ascending token ids, one after the other; set i ends at ends[i]."""
    distances = np.diff(ids.astype(np.int64), prepend=-1) - 1
    starts = np.array([0, *ends[:-1]])
    starts = starts[starts < len(ids)]
    distances[starts] = ids[starts]
    if not len(distances) or distances.max() < 128:
        return split_rows(distances.astype(np.uint8), [0, *ends])
    lengths = (distances[:, None] >= [0, 1 << 7, 1 << 14, 1 << 21, 1 << 28]).sum(1)
    byte_ends = np.cumsum(lengths)
    encoded = np.empty(byte_ends[-1], np.uint8)
    for n in range(int(lengths.max())):
        has_byte = lengths > n
        more = np.where(lengths[has_byte] > n + 1, 0x80, 0)
        at = byte_ends[has_byte] - lengths[has_byte] + n
        encoded[at] = distances[has_byte] >> 7 * n & 0x7F | more
    return split_rows(encoded, np.concatenate([[0], byte_ends])[[0, *ends]].tolist())


def split_rows(data: NDArray[np.uint8], offsets: Sequence[int]) -> list[bytes]:
    """The encoded supports in a buffer; support i is the bytes offsets[i] to offsets[i + 1]."""
    buffer = data.tobytes()
    return [buffer[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
