"""What the engine is to load: the pieces of a prompt that is predicted from anchors."""

from collections.abc import Iterator, Mapping, Sequence

from engine.kv_types import LoadPiece, Observed
from service.kv_reuse.anchor_selection import Candidates, Choice
from service.kv_reuse.anchors import Anchor
from service.kv_reuse.cache_entry import Kept
from service.kv_reuse.template import Shape, Stretch


def pieces_of(
    shape: Shape, bases: Mapping[int, Kept], found: Sequence[Candidates], choice: Choice
) -> tuple[LoadPiece, ...]:
    """They follow one another from the first token on."""
    return tuple(_pieces(shape, bases, found, choice))


def _pieces(
    shape: Shape, bases: Mapping[int, Kept], found: Sequence[Candidates], choice: Choice
) -> Iterator[LoadPiece]:
    for index, candidates in enumerate(found):
        stretch, weights = shape.stretches[index], choice.weights[index]
        if not stretch.num_tokens:
            continue
        if candidates.same is not None:
            yield _taken(stretch, candidates.same, index)
        elif stretch.name is None:
            nearest = max(weights, key=lambda anchor: weights[anchor])
            observed = [_observed(stretch, a, index, weight=w) for a, w in weights.items()]
            yield _taken(stretch, nearest, index, observed)
        elif index == 0:
            yield _alone(stretch, bases[0])
        else:
            observed = [_observed(stretch, a, index, base=a.bases[index]) for a in weights]
            yield _alone(stretch, bases[index], observed)


def _taken(
    stretch: Stretch, anchor: Anchor, index: int, observed: Sequence[Observed] = ()
) -> LoadPiece:
    """From where it stands in an anchor."""
    there = anchor.shape.stretches[index]
    return LoadPiece(
        source=anchor.real.slot,
        skip=there.start,
        num_tokens=stretch.num_tokens,
        start=stretch.start,
        shift=stretch.start - there.start,
        observed=tuple(observed),
    )


def _alone(stretch: Stretch, base: Kept, observed: Sequence[Observed] = ()) -> LoadPiece:
    """From the text as it was computed alone."""
    return LoadPiece(
        source=base.slot,
        skip=0,
        num_tokens=stretch.num_tokens,
        start=stretch.start,
        shift=stretch.start,
        observed=tuple(observed),
    )


def _observed(
    stretch: Stretch, anchor: Anchor, index: int, *, base: Kept | None = None, weight: float = 1.0
) -> Observed:
    there = anchor.shape.stretches[index]
    return Observed(
        real=anchor.real.slot,
        skip=there.start,
        shift=stretch.start - there.start,
        base=None if base is None else base.slot,
        weight=weight,
    )
