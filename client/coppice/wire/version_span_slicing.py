"""Slicing and concatenation of version spans, i.e. weights versions of ranges of tokens."""

from collections.abc import Iterable, Sequence

from coppice.wire.rollouts import VersionSpan


def cut_spans(spans: Iterable[VersionSpan], start: int, end: int) -> list[VersionSpan]:
    """Version spans of the tokens from start to end, with indices relative to start."""
    return [
        _moved(span, max(span.start, start) - start, min(span.end, end) - start)
        for span in spans
        if span.start < end and span.end > start
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
    return VersionSpan(version=span.version, start=start, end=end, adapter=span.adapter)
