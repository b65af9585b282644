"""Which anchors a prompt is predicted from, or that it is not.

A stretch whose text, like all in front of it, is an anchor's own is taken from that anchor: it is
what the prompt's own would be. Any other is predicted from anchors whose text there is at least as
long. They are shareable if some of them are much nearer than the others, that is, if the entropy of
how near they are is low (KVCOMM, arXiv 2510.12872).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from service.kv_reuse.anchors import Anchor
from service.kv_reuse.template import PromptTemplate

MAX_ANCHORS_PER_SECTION = 4
"""The nearest: each is read as often as something is predicted from it."""
USED_WEIGHT_SHARE = 0.9

DistanceMap = Mapping[tuple[int, Anchor], float]
"""By stretch, which has a name, and anchor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionCandidates:
    """Of a stretch: the anchor that begins with the same texts, or those that may tell. Of a
    nameless one these are the same as of the name in front of it, stretch `compared_section`."""

    exact_match: Anchor | None
    anchors: Sequence[Anchor]
    compared_section: int


@dataclass(slots=True, kw_only=True)
class AnchorSelection:
    """Stretch by stretch, how much each anchor counts; nothing where one has the same texts.
    `exact_tokens`: so many of the prompt's first are what they would be. `used` have told most of
    texts with a name. `sources` are all that is read."""

    weights: list[dict[Anchor, float]] = field(default_factory=list)
    exact_tokens: int = 0
    used: set[Anchor] = field(default_factory=set)
    sources: set[Anchor] = field(default_factory=set)


def find_candidates(
    template: PromptTemplate, anchors: Sequence[Anchor]
) -> list[SectionCandidates] | None:
    """None if there are too few for a stretch. What comes behind the last name is left out, and
    computed, unless all that may tell of it have it."""
    found: list[SectionCandidates] = []
    by, there = 0, list(anchors)
    for index, section in enumerate(template.sections):
        exact_match = [a for a in anchors if a.template.has_same_prefix(template, index + 1)]
        exact_match = [a for a in exact_match if _has_section(a, index, section.num_tokens)]
        if section.name is not None:
            by, there = index, [a for a in anchors if _has_section(a, index, section.num_tokens)]
        elif not exact_match and not all(
            _has_same_text(a, index, section.text_digest) for a in there
        ):
            break
        if not exact_match and len(there) < 2:
            return None
        last = exact_match[-1] if exact_match else None
        found.append(
            SectionCandidates(
                exact_match=last, anchors=[] if exact_match else there, compared_section=by
            )
        )
    return found


def pairs_to_compare(
    template: PromptTemplate, found: Sequence[SectionCandidates]
) -> Iterator[tuple[int, Anchor]]:
    for index, candidates in enumerate(found):
        if template.sections[index].name is not None:
            yield from ((index, anchor) for anchor in candidates.anchors)


def select_anchors(
    template: PromptTemplate,
    found: Sequence[SectionCandidates],
    distances: DistanceMap,
    threshold: float,
) -> AnchorSelection | None:
    """None if they are not shareable."""
    selection = AnchorSelection(exact_tokens=_exact_tokens(template, found))
    for section, candidates in zip(template.sections, found, strict=False):
        if candidates.exact_match is not None:
            selection.weights.append({})
            selection.sources.add(candidates.exact_match)
            selection.used |= set() if section.name is None else {candidates.exact_match}
            continue
        there = candidates.anchors
        section_distances = [distances[candidates.compared_section, anchor] for anchor in there]
        if not are_shareable(_distance_by_text(candidates, section_distances), threshold):
            return None
        weights_by_distance = similarity_weights(section_distances)
        ranked = sorted(zip(weights_by_distance, there, strict=True), key=lambda pair: -pair[0])
        selection.used.update(_heaviest(ranked))
        nearest = ranked[:MAX_ANCHORS_PER_SECTION]
        total = sum(share for share, _ in nearest)
        selection.weights.append({anchor: share / total for share, anchor in nearest})
        selection.sources.update(selection.weights[-1])
    return selection


def are_shareable(distances: Sequence[float], threshold: float) -> bool:
    """Each of another text: two anchors of one tell apart nothing, so that one text is near enough
    only where it is this one."""
    if threshold in (0.0, 1.0):
        return threshold == 1.0  # whatever rounding makes of the entropy
    if len(distances) == 1:
        return distances[0] == 0.0
    return entropy(similarity_weights(distances)) <= threshold * math.log2(len(distances))


def similarity_weights(distances: Sequence[float]) -> list[float]:
    """Softmax of minus the distances."""
    least = min(distances)
    shares = [math.exp(least - distance) for distance in distances]
    return [share / sum(shares) for share in shares]


def entropy(weights: Sequence[float]) -> float:
    """In bits."""
    return -sum(weight * math.log2(weight) for weight in weights if weight > 0)


def _distance_by_text(candidates: SectionCandidates, distances: Sequence[float]) -> list[float]:
    texts = [
        a.template.sections[candidates.compared_section].text_digest for a in candidates.anchors
    ]
    return list(dict(zip(texts, distances, strict=True)).values())


def _heaviest(ranked: Sequence[tuple[float, Anchor]]) -> Iterator[Anchor]:
    total = 0.0
    for share, anchor in ranked:
        if total >= USED_WEIGHT_SHARE:
            return
        total += share
        yield anchor


def _exact_tokens(template: PromptTemplate, found: Sequence[SectionCandidates]) -> int:
    """What the prompt begins with is a prefix whatever it is, and so is what an anchor begins with
    too."""
    exact = 0
    for index, candidates in enumerate(found):
        if index and candidates.exact_match is None:
            break
        exact = template.sections[index].end
    return exact


def _has_section(anchor: Anchor, index: int, num_tokens: int) -> bool:
    there = anchor.template.sections
    return index < len(there) and there[index].num_tokens >= num_tokens


def _has_same_text(anchor: Anchor, index: int, text_digest: bytes) -> bool:
    there = anchor.template.sections
    return index < len(there) and there[index].text_digest == text_digest
