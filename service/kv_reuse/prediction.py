"""Load pieces of a prompt that is predicted from anchors."""

from collections.abc import Iterator, Mapping, Sequence

from engine.kv_types import LoadPiece, ObservedKv
from service.kv_reuse.anchor_selection import AnchorSelection, SectionCandidates
from service.kv_reuse.anchors import Anchor
from service.kv_reuse.cache_entry import CacheEntry
from service.kv_reuse.template import PromptTemplate, TemplateSection


def load_pieces(
    template: PromptTemplate,
    bases: Mapping[int, CacheEntry],
    found: Sequence[SectionCandidates],
    selection: AnchorSelection,
) -> tuple[LoadPiece, ...]:
    """Consecutive pieces from the first token on."""
    return tuple(_pieces(template, bases, found, selection))


def _pieces(
    template: PromptTemplate,
    bases: Mapping[int, CacheEntry],
    found: Sequence[SectionCandidates],
    selection: AnchorSelection,
) -> Iterator[LoadPiece]:
    for index, candidates in enumerate(found):
        section, weights = template.sections[index], selection.weights[index]
        if not section.num_tokens:
            continue
        if candidates.exact_match is not None:
            yield _from_anchor(section, candidates.exact_match, index)
        elif section.name is None:
            nearest = max(weights, key=lambda anchor: weights[anchor])
            observations = [_observed(section, a, index, weight=w) for a, w in weights.items()]
            yield _from_anchor(section, nearest, index, observations)
        elif index == 0:
            yield _from_base(section, bases[0])
        else:
            observations = [_observed(section, a, index, base=a.bases[index]) for a in weights]
            yield _from_base(section, bases[index], observations)


def _from_anchor(
    section: TemplateSection, anchor: Anchor, index: int, observations: Sequence[ObservedKv] = ()
) -> LoadPiece:
    """Piece from an anchor's prompt KV."""
    there = anchor.template.sections[index]
    return LoadPiece(
        source=anchor.real.slot,
        token_offset=there.start,
        num_tokens=section.num_tokens,
        start=section.start,
        shift=section.start - there.start,
        observations=tuple(observations),
    )


def _from_base(
    section: TemplateSection, base: CacheEntry, observations: Sequence[ObservedKv] = ()
) -> LoadPiece:
    """Piece from a section's KV that was prefilled alone."""
    return LoadPiece(
        source=base.slot,
        token_offset=0,
        num_tokens=section.num_tokens,
        start=section.start,
        shift=section.start,
        observations=tuple(observations),
    )


def _observed(
    section: TemplateSection,
    anchor: Anchor,
    index: int,
    *,
    base: CacheEntry | None = None,
    weight: float = 1.0,
) -> ObservedKv:
    there = anchor.template.sections[index]
    return ObservedKv(
        real=anchor.real.slot,
        token_offset=there.start,
        shift=section.start - there.start,
        base=None if base is None else base.slot,
        weight=weight,
    )
