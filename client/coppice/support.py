"""Supports of sampled tokens, i.e. the sets of token ids that they were sampled from, decoded."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from coppice.wire.support import ALL, GivenSupport, decode_ids, decode_mask, support_answer


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
