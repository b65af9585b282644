"""Wire types for reuse of KV from earlier weights: request options, and KV ranges by version."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Literal

from pydantic import Field

from coppice.wire.base import MAX_TOKENS, AnswerModel, JsonInteger, Label, RequestModel

ActivationKv = Literal["reset", "keep_running"]


class KeepKv(RequestModel):
    """Option that lets new requests of a chain read KV that older weights computed.

    The KV is read for at most `max_lag` weights updates; without it, without a limit.
    """

    max_lag: Annotated[int, Field(ge=0, le=2**31), JsonInteger()] | None = None


class ChainKeepKv(KeepKv):
    """The same option of a rollout. Rollouts of one API key with the same `chain` share their KV.

    Without it the rollout is a chain of its own, whose name is the rollout's id.
    """

    chain: Label | None = None


class KvVersionSpan(AnswerModel):
    """Weights version that computed the KV at positions start to end (exclusive).

    Positions count from the start of the context. The tokens from `first_token` on were
    conditioned on this KV, up to the next larger `first_token` of the list.
    """

    version: str
    start: int
    end: int
    first_token: Annotated[int, Field(exclude_if=lambda first: first == 0)] = 0


KvVersions = Annotated[list[KvVersionSpan], Field(exclude_if=lambda spans: not spans)]
"""In answers: versions of the KV that the tokens were conditioned on; absent without tokens."""


class GivenKvSpan(RequestModel):
    """Weights version that computed a part of the KV of a sample that is resumed."""

    version: Label
    start: Annotated[int, Field(ge=0, le=2 * MAX_TOKENS), JsonInteger()]
    end: Annotated[int, Field(ge=0, le=2 * MAX_TOKENS), JsonInteger()]
    first_token: Annotated[int, Field(ge=0, le=MAX_TOKENS), JsonInteger()] = 0


def cut_kv_versions(
    spans: Sequence[KvVersionSpan], num_tokens: int, start: int, end: int
) -> list[KvVersionSpan]:
    """Spans of the tokens from start to end of a sample or segment with `num_tokens` tokens.

    Positions remain those of the context; the last token has no KV.
    """
    if not spans or start >= end:
        return []
    num_positions = spans[-1].end - (num_tokens - end)
    readings = list(_readings(spans))
    ends = [*(first for first, _ in readings[1:]), num_tokens]
    return [
        _changed(span, max(first - start, 0), min(span.end, num_positions))
        for (first, reading), next_first in zip(readings, ends, strict=True)
        for span in reading
        if first < end and next_first > start and span.start < num_positions
    ]


def joined_kv_versions(
    parts: Iterable[tuple[Sequence[KvVersionSpan], int]],
) -> list[KvVersionSpan]:
    """Concatenation of spans of consecutive tokens, given with their number of tokens."""
    joined: list[KvVersionSpan] = []
    offset = 0
    for spans, num_tokens in parts:
        for first, reading in _readings(spans):
            moved = [_changed(span, first + offset, span.end) for span in reading]
            joined = _appended(joined, moved)
        offset += num_tokens
    return joined


def _readings(spans: Iterable[KvVersionSpan]) -> Iterator[tuple[int, list[KvVersionSpan]]]:
    for first, reading in groupby(spans, key=lambda span: span.first_token):
        yield first, list(reading)


def _appended(known: list[KvVersionSpan], new: list[KvVersionSpan]) -> list[KvVersionSpan]:
    """Both readings of the KV; only the new one if the KV of the known positions is the same."""
    if not known:
        return new
    first = known[-1].first_token
    last = [span for span in known if span.first_token == first]
    moved = [_changed(span, first, span.end) for span in new]
    end = last[-1].end
    same = [_changed(span, first, min(span.end, end)) for span in moved if span.start < end]
    return known[: len(known) - len(last)] + moved if same == last else known + new


def _changed(span: KvVersionSpan, first_token: int, end: int) -> KvVersionSpan:
    return KvVersionSpan(version=span.version, start=span.start, end=end, first_token=first_token)
