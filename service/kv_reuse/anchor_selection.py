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
from service.kv_reuse.template import Shape

MOST_OBSERVED = 4
"""The nearest: each is read as often as something is predicted from it."""
CHOSEN_SHARE = 0.9

Distances = Mapping[tuple[int, Anchor], float]
"""By stretch, which has a name, and anchor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Of a stretch: the anchor that begins with the same texts, or those that may tell. Of a
    nameless one these are the same as of the name in front of it, stretch `compared_by`."""

    same: Anchor | None
    anchors: Sequence[Anchor]
    compared_by: int


@dataclass(slots=True, kw_only=True)
class Choice:
    """Stretch by stretch, how much each anchor counts; nothing where one has the same texts.
    `exact_tokens`: so many of the prompt's first are what they would be. `used` have told most of
    texts with a name. `sources` are all that is read."""

    weights: list[dict[Anchor, float]] = field(default_factory=list)
    exact_tokens: int = 0
    used: set[Anchor] = field(default_factory=set)
    sources: set[Anchor] = field(default_factory=set)


def candidates_of(shape: Shape, anchors: Sequence[Anchor]) -> list[Candidates] | None:
    """None if there are too few for a stretch. What comes behind the last name is left out, and
    computed, unless all that may tell of it have it."""
    found: list[Candidates] = []
    by, there = 0, list(anchors)
    for index, stretch in enumerate(shape.stretches):
        same = [a for a in anchors if a.shape.begins_like(shape, index + 1)]
        same = [a for a in same if _has(a, index, stretch.num_tokens)]
        if stretch.name is not None:
            by, there = index, [a for a in anchors if _has(a, index, stretch.num_tokens)]
        elif not same and not all(_has_text(a, index, stretch.text) for a in there):
            break
        if not same and len(there) < 2:
            return None
        last = same[-1] if same else None
        found.append(Candidates(same=last, anchors=[] if same else there, compared_by=by))
    return found


def compared(shape: Shape, found: Sequence[Candidates]) -> Iterator[tuple[int, Anchor]]:
    for index, candidates in enumerate(found):
        if shape.stretches[index].name is not None:
            yield from ((index, anchor) for anchor in candidates.anchors)


def choose(
    shape: Shape, found: Sequence[Candidates], distances: Distances, threshold: float
) -> Choice | None:
    """None if they are not shareable."""
    choice = Choice(exact_tokens=_exact_tokens(shape, found))
    for stretch, candidates in zip(shape.stretches, found, strict=False):
        if candidates.same is not None:
            choice.weights.append({})
            choice.sources.add(candidates.same)
            choice.used |= set() if stretch.name is None else {candidates.same}
            continue
        there = candidates.anchors
        far = [distances[candidates.compared_by, anchor] for anchor in there]
        if not shareable(_by_text(candidates, far), threshold):
            return None
        near = nearness(far)
        ranked = sorted(zip(near, there, strict=True), key=lambda pair: -pair[0])
        choice.used.update(_chosen(ranked))
        nearest = ranked[:MOST_OBSERVED]
        total = sum(share for share, _ in nearest)
        choice.weights.append({anchor: share / total for share, anchor in nearest})
        choice.sources.update(choice.weights[-1])
    return choice


def shareable(distances: Sequence[float], threshold: float) -> bool:
    """Each of another text: two anchors of one tell apart nothing, so that one text is near enough
    only where it is this one."""
    if threshold in (0.0, 1.0):
        return threshold == 1.0  # whatever rounding makes of the entropy
    if len(distances) == 1:
        return distances[0] == 0.0
    return entropy(nearness(distances)) <= threshold * math.log2(len(distances))


def nearness(distances: Sequence[float]) -> list[float]:
    """Softmax of minus the distances."""
    least = min(distances)
    shares = [math.exp(least - distance) for distance in distances]
    return [share / sum(shares) for share in shares]


def entropy(weights: Sequence[float]) -> float:
    """In bits."""
    return -sum(weight * math.log2(weight) for weight in weights if weight > 0)


def _by_text(candidates: Candidates, distances: Sequence[float]) -> list[float]:
    texts = [a.shape.stretches[candidates.compared_by].text for a in candidates.anchors]
    return list(dict(zip(texts, distances, strict=True)).values())


def _chosen(ranked: Sequence[tuple[float, Anchor]]) -> Iterator[Anchor]:
    total = 0.0
    for share, anchor in ranked:
        if total >= CHOSEN_SHARE:
            return
        total += share
        yield anchor


def _exact_tokens(shape: Shape, found: Sequence[Candidates]) -> int:
    """What the prompt begins with is a prefix whatever it is, and so is what an anchor begins with
    too."""
    exact = 0
    for index, candidates in enumerate(found):
        if index and candidates.same is None:
            break
        exact = shape.stretches[index].end
    return exact


def _has(anchor: Anchor, index: int, num_tokens: int) -> bool:
    there = anchor.shape.stretches
    return index < len(there) and there[index].num_tokens >= num_tokens


def _has_text(anchor: Anchor, index: int, text: bytes) -> bool:
    there = anchor.shape.stretches
    return index < len(there) and there[index].text == text
