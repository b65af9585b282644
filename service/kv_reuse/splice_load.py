"""The links of a chain: where each ends, and what all of them load."""

from collections.abc import Mapping, Sequence

from engine.kv_types import ExportSlot, Load, LoadPiece
from service.kv_reuse.layout import Span


def ends_of(spans: Sequence[Span]) -> list[int]:
    """Of every link but the last, which is the sampled group: one for each run of computed tokens
    that others are placed behind."""
    return [span.end for span in spans[:-1] if span.part is None]


def load_of(
    spans: Sequence[Span], segments: Mapping[int, ExportSlot], *, chain: str, num_requests: int
) -> Load:
    """From the kept segments, by their part."""
    pieces = tuple(
        LoadPiece(
            source=segments[span.part],
            skip=span.start - span.origin,
            num_tokens=span.num_tokens,
            start=span.start,
            shift=span.origin,
        )
        for span in spans
        if span.part is not None
    )
    exact = min((piece.start for piece in pieces), default=0)
    return Load(chain=chain, num_requests=num_requests, exact_tokens=exact, pieces=pieces)
