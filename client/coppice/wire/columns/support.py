"""Wire format of supports: per token, the set of token ids that it was sampled from.

The support of a token is one row of bytes. The first byte is the encoding, the rest its payload:

    0  all token ids of the vocabulary; no payload
    1  the token ids of the set
    2  the token ids that are not in the set
    3  bitmap, one bit per token id, least significant bit first
    4  the same set as an earlier token of the same sample or segment

Token ids are ascending. Each is stored as its distance from the previous one, less one, as a
little-endian base-128 varint; the first as its distance from -1. The payload of encoding 4 is one
varint: how many tokens before this one, less one.
"""

import base64
import binascii
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coppice.wire.base import AnswerModel, JsonInteger, RequestModel

ALL, IDS, COMPLEMENT, BITMAP, SAME = range(5)
MAX_VOCABULARY = 2**24


class SupportAnswer(AnswerModel):
    """Supports of the tokens of a sample or segment: the sets of ids that they were sampled from.

    `data` is the concatenation, in base64, of one encoded row of `lengths[i]` bytes per token.
    """

    vocab_size: int
    lengths: list[int]
    data: str


class GivenSupport(RequestModel):
    """Supports of the tokens of a sample to resume, as an earlier rollout returned them."""

    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCABULARY), JsonInteger()]
    lengths: Annotated[
        list[Annotated[int, Field(ge=1, le=MAX_VOCABULARY), JsonInteger()]],
        Field(min_length=1, max_length=1_048_576, fail_fast=True),
    ]
    data: Annotated[str, Field(max_length=2**31)]


def support_answer(rows: Iterable[bytes], vocab_size: int) -> SupportAnswer:
    """Builds the answer of rows without references; a repeated row becomes a reference."""
    encoded = _with_references(rows)
    return SupportAnswer(
        vocab_size=vocab_size,
        lengths=[len(row) for row in encoded],
        data=base64.b64encode(b"".join(encoded)).decode(),
    )


def rows_of(given: SupportAnswer | GivenSupport) -> list[bytes]:
    """Rows of an answer, with references resolved. Raises ValueError if they are inconsistent."""
    try:
        data = base64.b64decode(given.data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the supports are not in base64: {error}") from error
    return split_rows(data, given.lengths, given.vocab_size)


def split_rows(data: bytes, lengths: Sequence[int], vocab_size: int) -> list[bytes]:
    """Rows with references resolved. Raises ValueError if one of them is inconsistent.

    The token ids themselves are not decoded.
    """
    if sum(lengths) != len(data) or any(length < 1 for length in lengths):
        raise ValueError("the lengths of the supports do not match their bytes")
    rows, start = list[bytes](), 0
    for length in lengths:
        row = data[start : start + length]
        rows.append(_resolved(row, rows, vocab_size))
        start += length
    return rows


def decode_ids(row: bytes, vocab_size: int) -> NDArray[np.int32]:
    """Ascending token ids of a support. Raises ValueError if the row is inconsistent."""
    kind, payload = row[0], np.frombuffer(row, np.uint8, offset=1)
    if kind in (IDS, COMPLEMENT):
        listed = _ids(payload)
        if len(listed) and listed[-1] >= vocab_size:
            raise ValueError("a support has token ids outside of the vocabulary")
        if kind == IDS:
            return listed
    return np.flatnonzero(decode_mask(row, vocab_size)).astype(np.int32)


def decode_mask(row: bytes, vocab_size: int) -> NDArray[np.bool_]:
    """Support as one boolean per token id. Raises ValueError if the row is inconsistent."""
    kind, payload = row[0], np.frombuffer(row, np.uint8, offset=1)
    if kind == BITMAP:
        return np.unpackbits(payload, count=vocab_size, bitorder="little").view(np.bool_)
    mask = np.full(vocab_size, kind != IDS)
    if kind in (IDS, COMPLEMENT):
        listed = _ids(payload)
        if len(listed) and listed[-1] >= vocab_size:
            raise ValueError("a support has token ids outside of the vocabulary")
        mask[listed] = kind == IDS
    return mask


def _ids(payload: NDArray[np.uint8]) -> NDArray[np.int32]:
    if not len(payload):
        return np.empty(0, np.int32)
    is_last = payload < 0x80
    if not is_last[-1]:
        raise ValueError("a support ends within a token id")
    ends = np.flatnonzero(is_last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    if (ends - starts).max() > 4:
        raise ValueError("a support has a token id of more than 5 bytes")
    shifts = 7 * (np.arange(len(payload)) - np.repeat(starts, ends - starts + 1))
    parts = (payload & 0x7F).astype(np.int64) << shifts
    ids = np.cumsum(np.add.reduceat(parts, starts) + 1) - 1
    capped: NDArray[np.int32] = np.minimum(ids, 2**31 - 1).astype(np.int32)
    return capped


def _with_references(rows: Iterable[bytes]) -> list[bytes]:
    first, encoded = dict[bytes, int](), list[bytes]()
    for at, row in enumerate(rows):
        reference = bytes([SAME]) + _varint(at - first.setdefault(row, at) - 1)
        encoded.append(row if first[row] == at or len(row) <= len(reference) else reference)
    return encoded


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, max(value, 0)])


def _varint_value(payload: bytes) -> int | None:
    """Value of one varint of at most 5 bytes; None if the payload is anything else.

    Without NumPy, whose calls take ten times as long for so few bytes.
    """
    if not 1 <= len(payload) <= 5 or payload[-1] >= 0x80 or min(payload[:-1], default=0x80) < 0x80:
        return None
    return sum((byte & 0x7F) << 7 * at for at, byte in enumerate(payload))


def _resolved(row: bytes, earlier: Sequence[bytes], vocab_size: int) -> bytes:
    kind = row[0]
    if kind == SAME:
        back = _varint_value(row[1:])
        if back is None or back >= len(earlier):
            raise ValueError("a support refers to a token that does not precede it")
        return earlier[-1 - back]
    wanted = {ALL: 1, BITMAP: 1 + (vocab_size + 7) // 8}.get(kind, len(row))
    if kind > SAME or len(row) != wanted:
        raise ValueError("a support has an unknown encoding or a wrong length")
    return row


@dataclass(frozen=True, slots=True, eq=False)
class Support(Sequence[NDArray[np.int32]]):
    """Support of each token of a sample: a sequence of ascending arrays of token ids.

    The sets stay encoded until they are read. A slice is a Support again.
    """

    rows: tuple[bytes, ...]
    vocab_size: int

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> NDArray[np.int32]: ...
    @overload
    def __getitem__(self, index: slice) -> "Support": ...
    def __getitem__(self, index: int | slice) -> "NDArray[np.int32] | Support":
        if isinstance(index, slice):
            return Support(self.rows[index], self.vocab_size)
        return decode_ids(self.rows[index], self.vocab_size)

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return (decode_ids(row, self.vocab_size) for row in self.rows)

    @property
    def is_whole(self) -> bool:
        """True if every token was sampled from the whole vocabulary."""
        return all(row[0] == ALL for row in self.rows)

    @property
    def num_bytes(self) -> int:
        """Size of the encoded sets in bytes, each distinct one counted once."""
        return sum(map(len, set(self.rows)))

    def mask(self) -> NDArray[np.bool_]:
        """Supports as booleans [tokens, vocabulary]."""
        mask = np.empty((len(self.rows), self.vocab_size), np.bool_)
        for at, row in enumerate(self.rows):
            mask[at] = decode_mask(row, self.vocab_size)
        return mask

    def to_wire(self) -> GivenSupport:
        """The field `support` of a sample in `continue_from`."""
        answer = support_answer(self.rows, self.vocab_size)
        return GivenSupport(vocab_size=answer.vocab_size, lengths=answer.lengths, data=answer.data)


def joined_support(parts: Sequence[Support | None]) -> Support | None:
    """Support of consecutive parts of a response; None if a part has none."""
    given = [part for part in parts if part is not None]
    if not given or len(given) < len(parts):
        return None
    return Support(tuple(row for part in given for row in part.rows), given[0].vocab_size)
