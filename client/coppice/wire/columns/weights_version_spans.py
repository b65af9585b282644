"""Wire type of the weights version of each range of generated tokens; slicing and joining."""

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

from coppice.wire.base import (
    MAX_TOKENS,
    AdapterLabel,
    AdapterName,
    AnswerModel,
    JsonInteger,
    Label,
    RequestModel,
)


class VersionSpan(AnswerModel):
    """Weights version that generated tokens start to end (exclusive) of a sample or segment.

    `adapter` is the `name@version` of the LoRA adapter, if one was used.
    """

    version: str
    start: int
    end: int
    adapter: AdapterLabel = None


class GivenSpan(RequestModel):
    """Weights version and adapter that generated tokens start to end (exclusive) of a sample."""

    version: Label
    start: Annotated[int, Field(ge=0, le=MAX_TOKENS), JsonInteger()]
    end: Annotated[int, Field(ge=0, le=MAX_TOKENS), JsonInteger()]
    adapter: AdapterName | None = None


def cut_spans(spans: Iterable[VersionSpan], start: int, end: int) -> list[VersionSpan]:
    """Version spans of the tokens from start to end, with indices relative to start."""
    return [
        _moved(span, max(span.start, start) - start, min(span.end, end) - start)
        for span in spans
        if max(span.start, start) < min(span.end, end)
    ]


def joined_spans(parts: Iterable[tuple[Sequence[VersionSpan], int]]) -> list[VersionSpan]:
    """Concatenates lists of version spans, given with token counts, and merges equal neighbors."""
    joined: list[VersionSpan] = []
    offset = 0
    for spans, num_tokens in parts:
        for span in spans:
            start = span.start + offset
            if joined and joined[-1].end == start and _same_version(joined[-1], span):
                start = joined.pop().start
            joined.append(_moved(span, start, span.end + offset))
        offset += num_tokens
    return joined


def _same_version(one: VersionSpan, other: VersionSpan) -> bool:
    return (one.version, one.adapter) == (other.version, other.adapter)


def _moved(span: VersionSpan, start: int, end: int) -> VersionSpan:
    if (span.start, span.end) == (start, end):
        return span
    return VersionSpan(version=span.version, start=start, end=end, adapter=span.adapter)
