"""Dataclass of all per-token data of a response (ids, logprobs, versions), and its wire fields.

A new column is a line of `TokenColumns`, and a line of each of the wire forms that are to have it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from coppice.wire.base import ABSENT, MAX_TOKENS, UNUSED, AnswerModel, RequestModel, TokenIds
from coppice.wire.columns.kinds import (
    Experts,
    Kind,
    KvSpans,
    Sets,
    Spans,
    Tables,
    Tensors,
    Values,
)
from coppice.wire.columns.kv_version_spans import GivenKvSpan, KvVersions, KvVersionSpan
from coppice.wire.columns.logprobs import Logprobs, OptionalLogprobs, TokenLogprobs
from coppice.wire.columns.routed_experts import RoutedExperts
from coppice.wire.columns.support import GivenSupport, Support, SupportAnswer
from coppice.wire.columns.weights_version_spans import GivenSpan, VersionSpan

Ints = TypeVar("Ints", bound=Sized)
Floats = TypeVar("Floats", bound=Sized)
FLOATS: Final = Values(np.float32, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenColumns(Generic[Ints, Floats]):
    """Columns of consecutive tokens of a response; None for a column that was not requested.

    logprobs[i] belongs to token_ids[i]. Indices in `versions` start at the first token, positions
    in `kv_versions` with the prompt. Tokens of context have neither logprobs nor versions.
    """

    token_ids: Annotated[Ints, Values(np.int64, np.int32, is_required=True)]
    logprobs: Annotated[Floats, Values(np.float32, np.float32, is_required=True)]
    versions: Annotated[tuple[VersionSpan, ...], Spans()]
    kv_versions: Annotated[tuple[KvVersionSpan, ...], KvSpans()] = ()
    entropy: Annotated[Floats | None, FLOATS] = None
    raw_logprobs: Annotated[Floats | None, FLOATS] = None
    """Logprobs of the tokens under the model's own distribution, if they were requested."""
    top_logprobs: Annotated[TokenLogprobs | None, Tables()] = None
    """Most probable tokens at each token, if they were requested.

    Tokens that a resumed sample already had have none.
    """
    given_logprobs: Annotated[TokenLogprobs | None, Tables()] = None
    """Logprobs of `logprob_token_ids` at each token, like `top_logprobs`."""
    support: Annotated[Support | None, Sets()] = None
    """Sets of ids that the tokens were sampled from, if `return_support` was set."""
    routed_experts: Annotated[RoutedExperts | None, Experts()] = None
    """Experts that the model selected for each token that it has read, if they were requested.

    For a resumed sample they begin where those of its earlier part end; see `RoutedExperts.joined`.
    """

    def columns(self) -> dict[str, Any]:
        """Values of all columns, by name."""
        return {name: getattr(self, name) for name in COLUMNS}

    def _present(self) -> Iterator[tuple[str, Kind, Any]]:
        for name, kind in COLUMNS.items():
            values = getattr(self, name)
            if values is not None:
                yield name, kind, values

    def part(self, start: int, end: int) -> "TokenColumns[Ints, Floats]":
        """Columns of the tokens start to end (exclusive)."""
        length = len(self.token_ids)
        return TokenColumns(
            **{name: kind.part(each, start, end, length) for name, kind, each in self._present()}
        )

    def pieces(self, cuts: Sequence[int]) -> "list[TokenColumns[Ints, Floats]]":
        """Parts between the given positions, which are ascending and not at the ends."""
        borders = [0, *cuts, len(self.token_ids)]
        return [self.part(start, end) for start, end in zip(borders, borders[1:], strict=False)]

    @staticmethod
    def joined(
        parts: "Iterable[TokenColumns[Ints, Floats]]",
    ) -> "TokenColumns[Ints, Floats]":
        """Columns of consecutive parts, of which there is at least one.

        A column that only some of the parts have is filled up, as its kind describes.
        """
        found = list(parts)
        lengths = [len(part.token_ids) for part in found]
        columns = dict[str, Any]()
        for name, kind in COLUMNS.items():
            values = [getattr(part, name) for part in found]
            if any(each is not None for each in values):
                columns[name] = kind.joined(list(zip(values, lengths, strict=True)))
        return TokenColumns(**columns)

    def arrays(self) -> "TokenArrays":
        """The columns as they are in the client, with NumPy arrays."""
        return TokenColumns(**{name: kind.to_array(each) for name, kind, each in self._present()})

    def wire_fields(self, model: type[BaseModel]) -> dict[str, Any]:
        """Fields of a wire form with the columns that it has."""
        return {
            name: kind.to_wire(each)
            for name, kind, each in self._present()
            if name in model.model_fields
        }


COLUMNS: Final[Mapping[str, Kind]] = {
    each.name: each.type.__metadata__[0]  # type: ignore[union-attr]  # of Annotated
    for each in fields(TokenColumns)
}
TokenLists: TypeAlias = TokenColumns[list[int], list[float]]
TokenArrays: TypeAlias = TokenColumns[NDArray[np.int64], NDArray[np.float32]]
TABLES: Final = tuple(
    each.name
    for each in fields(TokenColumns)
    if each.default is None and not isinstance(COLUMNS[each.name], Values)
)
"""Columns with several values per token."""


class TokenFields(AnswerModel):
    """Columns of a sample or segment in answers. logprobs[i] belongs to token_ids[i]."""

    token_ids: list[int]
    logprobs: list[float]
    support: Annotated[SupportAnswer | None, ABSENT] = None
    """Supports of the tokens, if `return_support` was set; else absent."""
    versions: list[VersionSpan]
    kv_versions: KvVersions = []
    top_logprobs: OptionalLogprobs = None
    """Most probable tokens of the sampling distribution at each token."""
    given_logprobs: OptionalLogprobs = None
    """Logprobs of `logprob_token_ids` at each token."""
    raw_logprobs: Annotated[list[float] | None, ABSENT] = None
    """Logprobs of the tokens under the model's own distribution, if requested."""


class GivenTokenFields(RequestModel):
    """Columns of a sample to resume, in requests."""

    token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_TOKENS)]
    logprobs: Annotated[Logprobs, Field(min_length=1, max_length=MAX_TOKENS)]
    raw_logprobs: Annotated[Logprobs, Field(min_length=1, max_length=MAX_TOKENS)] | None = None
    versions: Annotated[list[GivenSpan], Field(min_length=1, max_length=4096, fail_fast=True)]
    kv_versions: Annotated[list[GivenKvSpan], Field(max_length=16_384, fail_fast=True), UNUSED] = []
    support: GivenSupport | None = None


Fields = TypeVar("Fields", bound=TokenFields)


def columns_of(wire: TokenFields | GivenTokenFields, **known: Any) -> TokenLists:
    """Columns of a wire form, except for those that are `known` already."""
    found = {name: getattr(wire, name, None) for name in COLUMNS if name not in known}
    values = {name: COLUMNS[name].of_wire(each) for name, each in found.items() if each is not None}
    return TokenColumns(**values, **known)


def column_bytes(wire: TokenFields, names: Iterable[str] = tuple(COLUMNS)) -> int:
    """Estimated memory of columns of a wire form, in bytes."""
    found = ((COLUMNS[name], getattr(wire, name, None)) for name in names)
    return sum(kind.num_bytes(each) for kind, each in found if each is not None)


def column_tensors(parts: Sequence[TokenFields]) -> Tensors:
    """Tensors of a packed result with the columns of its parts."""
    lengths = [len(part.token_ids) for part in parts]
    tensors: Tensors = {"offsets": np.cumsum([0, *lengths], dtype=np.int64)}
    for name, kind in COLUMNS.items():
        tensors |= kind.tensors(name, [getattr(part, name, None) for part in parts], lengths)
    return tensors


def without_tensors(part: Fields) -> Fields:
    """Copy of a part whose fields only show which columns the tensors have."""
    found = {name: getattr(part, name, None) for name in COLUMNS}
    bare = {name: COLUMNS[name].bare(each) for name, each in found.items() if each is not None}
    return part.model_copy(update=bare)


def columns_of_tensors(bares: Sequence[TokenFields], tensors: Tensors) -> list[TokenArrays]:
    """Columns of the parts of a packed result. Raises ValueError if they are inconsistent."""
    lengths = np.diff(tensors["offsets"]).tolist()
    if len(lengths) != len(bares) or min(lengths, default=0) < 0 or tensors["offsets"][0] != 0:
        raise ValueError("the offsets do not match the samples")
    found: list[dict[str, Any]] = [{} for _ in bares]
    for name, kind in COLUMNS.items():
        fields_of_parts = [getattr(each, name, None) for each in bares]
        if any(bare is not None for bare in fields_of_parts):
            values = kind.unpacked(name, tensors, fields_of_parts, lengths)
            for columns, bare, each in zip(found, fields_of_parts, values, strict=True):
                columns[name] = None if bare is None else each
    return [TokenColumns(**columns) for columns in found]
