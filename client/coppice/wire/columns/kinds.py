"""Kinds of per-token columns (values, sets, tables): how each is sliced, joined and serialized.

The values of a column have three forms. In the server they are lists and encoded sets, in the
client NumPy arrays. In the wire form they are fields of pydantic models. In a packed result some
are tensors instead, and the field is `bare`: it only shows that the column is present.
"""

import math
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coppice.wire.columns.kv_version_spans import KvVersionSpan, cut_kv_versions, joined_kv_versions
from coppice.wire.columns.logprobs import TokenLogprobs
from coppice.wire.columns.routed_experts import RoutedExperts
from coppice.wire.columns.support import ALL, Support, rows_of, split_rows, support_answer
from coppice.wire.columns.weights_version_spans import VersionSpan, cut_spans, joined_spans

Tensors = dict[str, NDArray[Any]]
Part = tuple[Any, int]
"""Values of consecutive tokens, None if they are missing, and the number of these tokens."""
VALUE_BYTES = 40
"""A number, and its place in a list."""
SPAN_BYTES = 1024
NO_ENTRIES = TokenLogprobs.empty(0)


class Kind(ABC):
    """Operations on the values of one column; the last ones are those of packed results.

    `wires` are fields of several parts of a result, `bares` the same fields in a packed one, and
    `lengths` the numbers of tokens of these parts. By default, a field has the values themselves,
    and a packed result has it in its JSON.
    """

    @abstractmethod
    def part(self, values: Any, start: int, end: int, length: int) -> Any:
        """Values of the tokens start to end (exclusive) of `length` tokens."""

    @abstractmethod
    def joined(self, parts: Sequence[Part]) -> Any:
        """Values of consecutive parts, at least one of which has them. Others are filled up."""

    @abstractmethod
    def fits(self, values: Any, length: int) -> bool:
        """True if the values are those of `length` tokens that were sampled."""

    @abstractmethod
    def num_bytes(self, wire: Any) -> int:
        """Estimated memory of a field, in bytes."""

    def to_wire(self, values: Any) -> Any:
        return values

    def of_wire(self, wire: Any) -> Any:
        return wire

    def to_array(self, values: Any) -> Any:
        """The values as they are in the client."""
        return values

    def bare(self, wire: Any) -> Any:
        return wire

    def tensors(self, name: str, wires: Sequence[Any], lengths: Sequence[int]) -> Tensors:
        """Tensors of a packed result; none if no part has the column."""
        return {}

    def unpacked(
        self, name: str, tensors: Tensors, bares: Sequence[Any], lengths: Sequence[int]
    ) -> list[Any]:
        """Values of all parts, of which some have the column; of the others they are of no use.

        Raises ValueError if the tensors do not match the parts.
        """
        return [self.of_wire(bare) for bare in bares]


@dataclass(frozen=True)
class Values(Kind):
    """One number per token. Tokens without it, such as those of context, have NaN.

    `dtype` is that of the client's arrays, `packed` that of the tensor, which a packed result also
    has without any part if the column `is_required`.
    """

    dtype: type[np.generic]
    packed: type[np.generic]
    is_required: bool = False

    def part(self, values: Any, start: int, end: int, length: int) -> Any:
        return values[start:end]

    def joined(self, parts: Sequence[Part]) -> Any:
        found = [_filled(*part) for part in parts]
        if any(isinstance(values, np.ndarray) for values in found):
            return np.concatenate([np.asarray(values, self.dtype) for values in found])
        return [*chain.from_iterable(found)]

    def fits(self, values: Any, length: int) -> bool:
        return len(values) == length and not any(map(math.isnan, values))

    def num_bytes(self, wire: Any) -> int:
        return VALUE_BYTES * len(wire)

    def to_wire(self, values: Any) -> Any:
        return values.tolist() if isinstance(values, np.ndarray) else values

    def to_array(self, values: Any) -> Any:
        return np.array(values, self.dtype)

    def bare(self, wire: Any) -> Any:
        return []

    def tensors(self, name: str, wires: Sequence[Any], lengths: Sequence[int]) -> Tensors:
        if not self.is_required and all(wire is None for wire in wires):
            return {}
        found = [
            np.asarray(_filled(*part), self.packed) for part in zip(wires, lengths, strict=True)
        ]
        return {name: np.concatenate([np.empty(0, self.packed), *found])}

    def unpacked(
        self, name: str, tensors: Tensors, bares: Sequence[Any], lengths: Sequence[int]
    ) -> list[Any]:
        return [np.array(values, self.dtype) for values in split(name, tensors[name], lengths)]


def _filled(values: Any, length: int) -> Any:
    """The values of a part, or NaN for each of its tokens."""
    return values if values is not None and len(values) else [np.nan] * length


def split(name: str, values: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    """Parts of a tensor. Raises ValueError if it is not as long as all of them together."""
    if len(values) != sum(lengths):
        raise ValueError(f"{name} does not match the lengths of the parts")
    return np.split(values, np.cumsum(lengths)[:-1]) if lengths else []


class Spans(Kind):
    """Weights versions of ranges of tokens; tokens of context have none."""

    def part(
        self, values: Sequence[VersionSpan], start: int, end: int, length: int
    ) -> tuple[VersionSpan, ...]:
        return tuple(cut_spans(values, start, end))

    def joined(self, parts: Sequence[Part]) -> tuple[VersionSpan, ...]:
        return tuple(joined_spans((values or (), length) for values, length in parts))

    def fits(self, values: Sequence[VersionSpan], length: int) -> bool:
        borders = [0, *(span.end for span in values)]
        is_ascending = all(start < end for start, end in pairwise(borders))
        starts = [span.start for span in values]
        return is_ascending and starts == borders[:-1] and borders[-1] == length

    def num_bytes(self, wire: Any) -> int:
        return SPAN_BYTES * len(wire)

    def to_wire(self, values: Any) -> Any:
        return list(values)

    def of_wire(self, wire: Any) -> tuple[VersionSpan, ...]:
        return tuple(
            span if isinstance(span, VersionSpan) else VersionSpan(**dict(span)) for span in wire
        )


class KvSpans(Spans):
    """Weights versions of the KV that the tokens were conditioned on, as ranges of positions."""

    def part(self, values: Any, start: int, end: int, length: int) -> Any:
        return tuple(cut_kv_versions(values, length, start, end))

    def joined(self, parts: Sequence[Part]) -> Any:
        return tuple(joined_kv_versions((values or (), length) for values, length in parts))

    def fits(self, values: Any, length: int) -> bool:
        first_tokens = [span.first_token for span in values]
        return (
            first_tokens == sorted(first_tokens)
            and all(0 <= first < length for first in first_tokens)
            and all(0 <= span.start < span.end for span in values)
        )

    def of_wire(self, wire: Any) -> Any:
        return tuple(
            span if isinstance(span, KvVersionSpan) else KvVersionSpan(**dict(span))
            for span in wire
        )


class Tables(Kind):
    """Logprobs of several tokens at each token."""

    def part(self, values: TokenLogprobs, start: int, end: int, length: int) -> TokenLogprobs:
        return values.part(start, end)

    def joined(self, parts: Sequence[Part]) -> TokenLogprobs:
        return TokenLogprobs.joined(
            TokenLogprobs.empty(length) if values is None else values for values, length in parts
        )

    def fits(self, values: TokenLogprobs, length: int) -> bool:
        return values.num_positions == length

    def num_bytes(self, wire: TokenLogprobs) -> int:
        return wire.num_bytes

    def bare(self, wire: TokenLogprobs) -> TokenLogprobs:
        return NO_ENTRIES

    def tensors(self, name: str, wires: Sequence[Any], lengths: Sequence[int]) -> Tensors:
        if all(wire is None for wire in wires):
            return {}
        joined = self.joined(list(zip(wires, lengths, strict=True)))
        return {f"{name}.{field}": getattr(joined, field) for field in TokenLogprobs.model_fields}

    def unpacked(
        self, name: str, tensors: Tensors, bares: Sequence[Any], lengths: Sequence[int]
    ) -> list[Any]:
        return list(tables_of(name, tensors, lengths))


def tables_of(
    name: str, tensors: Mapping[str, NDArray[Any]], lengths: Sequence[int]
) -> Iterator[TokenLogprobs]:
    """Tables of the parts of a packed result. Raises ValueError if they are inconsistent."""
    if f"{name}.offsets" not in tensors:
        return iter([NO_ENTRIES] * len(lengths))
    fields = {field: tensors.get(f"{name}.{field}") for field in TokenLogprobs.model_fields}
    table = TokenLogprobs.model_validate(fields)
    if table.num_positions != sum(lengths):
        raise ValueError(f"{name} does not match the tokens")
    return table.split(lengths)


class Sets(Kind):
    """Set of token ids per token, which it was sampled from. Context has the whole vocabulary."""

    def part(self, values: Support, start: int, end: int, length: int) -> Support:
        return values[start:end]

    def joined(self, parts: Sequence[Part]) -> Support:
        [vocab_size, *_] = [values.vocab_size for values, _ in parts if values is not None]
        rows = ((bytes([ALL]),) * num if values is None else values.rows for values, num in parts)
        return Support(tuple(chain.from_iterable(rows)), vocab_size)

    def fits(self, values: Support, length: int) -> bool:
        return len(values) == length

    def num_bytes(self, wire: Any) -> int:
        return len(wire.data) + VALUE_BYTES * len(wire.lengths)

    def to_wire(self, values: Support) -> Any:
        return support_answer(values.rows, values.vocab_size)

    def of_wire(self, wire: Any) -> Support:
        return Support(tuple(rows_of(wire)), wire.vocab_size)

    def bare(self, wire: Any) -> Any:
        return wire.model_copy(update={"lengths": [], "data": ""})

    def tensors(self, name: str, wires: Sequence[Any], lengths: Sequence[int]) -> Tensors:
        """The lengths of all encoded sets, 0 for parts without sets, and the sets."""
        if all(wire is None for wire in wires):
            return {}
        sizes = [
            [0] * num if wire is None else wire.lengths
            for wire, num in zip(wires, lengths, strict=True)
        ]
        data = b"".join(b64decode(wire.data) for wire in wires if wire is not None)
        return {
            f"{name}_lengths": np.array([*chain.from_iterable(sizes)], np.uint32),
            f"{name}_data": np.frombuffer(data, np.uint8),
        }

    def unpacked(
        self, name: str, tensors: Tensors, bares: Sequence[Any], lengths: Sequence[int]
    ) -> list[Any]:
        sizes = split(f"{name}_lengths", tensors[f"{name}_lengths"].astype(np.int64), lengths)
        data = split(f"{name}_data", tensors[f"{name}_data"], [int(part.sum()) for part in sizes])
        return [
            bare and self._rows(own.tobytes(), of_rows.tolist(), bare.vocab_size)
            for bare, of_rows, own in zip(bares, sizes, data, strict=True)
        ]

    def _rows(self, data: bytes, lengths: Sequence[int], vocab_size: int) -> Support:
        return Support(tuple(split_rows(data, lengths, vocab_size)), vocab_size)


class Experts(Kind):
    """Routed experts of the tokens that the model has read: of the prompt, and all but the last.

    A part that does not begin with the first token has no experts of the prompt. It begins with
    the token before its own first one, as those of a resumed sample do.
    """

    def part(self, values: RoutedExperts, start: int, end: int, length: int) -> RoutedExperts:
        num_rows = values.shape[0]
        first = num_rows - length + start if start else 0
        return RoutedExperts.of(values.start + first, values.array[first : num_rows - length + end])

    def joined(self, parts: Sequence[Part]) -> RoutedExperts:
        """Experts of the parts that have some: those of given tokens are not known."""
        return RoutedExperts.joined([values for values, _ in parts if values is not None])

    def fits(self, values: RoutedExperts, length: int) -> bool:
        return values.start + values.shape[0] >= length - 1

    def num_bytes(self, wire: RoutedExperts) -> int:
        return len(wire.data)

    def bare(self, wire: RoutedExperts) -> RoutedExperts:
        return wire.model_copy(update={"data": b""})

    def tensors(self, name: str, wires: Sequence[Any], lengths: Sequence[int]) -> Tensors:
        arrays = [wire.array for wire in wires if wire is not None]
        return {name: np.concatenate(arrays)} if arrays else {}

    def unpacked(
        self, name: str, tensors: Tensors, bares: Sequence[Any], lengths: Sequence[int]
    ) -> list[Any]:
        num_rows = [0 if bare is None else bare.shape[0] for bare in bares]
        parts = split(name, tensors[name], num_rows)
        return [
            bare and _with_rows(name, bare, rows) for bare, rows in zip(bares, parts, strict=True)
        ]


def _with_rows(name: str, experts: RoutedExperts, rows: NDArray[Any]) -> RoutedExperts:
    if rows.shape != experts.shape or rows.dtype != np.dtype(experts.dtype):
        raise ValueError(f"{name} does not match the samples")
    return experts.model_copy(update={"data": rows.tobytes()})
