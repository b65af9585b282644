"""The links of a chain: what each computes, and what it loads in front of that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.protocol import ExportSlot, Load, LoadPiece
from service.reuse.spans import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """`before` lies in front of what it computes."""

    computed: Span
    before: tuple[Span, ...]

    def load(
        self, segments: Mapping[int, ExportSlot], computed: Mapping[int, ExportSlot]
    ) -> Load | None:
        """From the kept segments, by their part, and from earlier links, by where these began."""
        pieces = tuple(_piece(span, segments, computed) for span in self.before)
        return Load(pieces=pieces) if pieces else None


def links_of(spans: Sequence[Span]) -> list[Link]:
    """One for every computed span; the first loads nothing, the last is the sampled group's."""
    return [
        Link(computed=span, before=tuple(spans[:index]))
        for index, span in enumerate(spans)
        if span.part is None
    ]


def _piece(
    span: Span, segments: Mapping[int, ExportSlot], computed: Mapping[int, ExportSlot]
) -> LoadPiece:
    if span.part is None:
        return LoadPiece(source=computed[span.start], skip=0, num_tokens=span.num_tokens, shift=0)
    return LoadPiece(
        source=segments[span.part],
        skip=span.start - span.origin,
        num_tokens=span.num_tokens,
        shift=span.origin,
    )
