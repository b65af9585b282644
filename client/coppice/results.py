"""Rollout results with token ids and logprobs as numpy arrays.

The arrays are writable and have no other owner, so torch.from_numpy takes them without a copy.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from coppice.samples import Sample
from coppice.tree import Segment, Tree, tree_of
from coppice.wire.kv import KvHandle, KvReason
from coppice.wire.packed import Packed, Part, parts_of
from coppice.wire.reuse import ReuseAnswer
from coppice.wire.rollouts import (
    GroupHead,
    Outcome,
    RolloutAnswer,
    SampleAnswer,
    SegmentAnswer,
    Usage,
)

_FINISHED = frozenset({"stop", "length", "error"})


# NumPy's == is elementwise, so these dataclasses compare by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """One prompt with its samples, ordered by index, or with its rollout tree.

    A tree requested with flatten=True also has samples: one per leaf, the tokens from the prompt
    to that leaf. `num_dropped` counts the segments that the caller removed from an externally grown
    tree. `chosen` holds the indices of the samples that Finish(samples=...) selected, or None if
    there was no selection. If `exact` is False, the samples come from an approximation of the
    prompt's KV: recompute their logprobs and apply importance weights. `reuse` reports how much of
    a prompt given as reusable spans was prefilled.
    """

    id: str
    index: int
    outcome: Outcome
    exact: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    samples: tuple[Sample, ...]
    kv: KvHandle | None = None
    kv_reason: KvReason | None = None
    """The reason why a requested handle is missing."""
    tree: Tree | None = None
    num_dropped: int = 0
    chosen: tuple[int, ...] | None = None
    reuse: ReuseAnswer | None = None

    @property
    def unfinished(self) -> tuple[Sample, ...]:
        """Samples that were ended early. Pass them to `continue_from` to resume them."""
        return tuple(s for s in self.samples if s.finish_reason not in _FINISHED)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutResult:
    """All groups of a rollout, in request order."""

    id: str
    outcome: Outcome
    groups: tuple[Group, ...]
    usage: Usage


def sample_of(answer: SampleAnswer) -> Sample:
    return _sample_of(answer, answer.token_ids, answer.logprobs)


def segment_of(answer: SegmentAnswer) -> Segment:
    entropy = [] if answer.entropy is None else answer.entropy
    return _segment_of(answer, answer.token_ids, answer.logprobs, entropy)


def group_of(head: GroupHead, samples: Iterable[Sample], segments: Iterable[Segment]) -> Group:
    """Builds a Group. Raises ValueError if the segments of a tree are inconsistent."""
    return Group(
        id=head.id,
        index=head.index,
        outcome=head.outcome,
        exact=head.exact,
        num_prompt_tokens=head.num_prompt_tokens,
        num_cached_tokens=head.num_cached_tokens,
        kv=head.kv,
        kv_reason=head.kv_reason,
        samples=tuple(sorted(samples, key=lambda sample: sample.index)),
        tree=None if head.leaves is None else tree_of(segments, head.leaves),
        num_dropped=head.num_dropped,
        chosen=None if head.chosen is None else tuple(head.chosen),
        reuse=head.reuse,
    )


def result_of(answer: RolloutAnswer) -> RolloutResult:
    return _result_of(answer, map(_part_of, parts_of(answer)))


def result_of_packed(packed: Packed) -> RolloutResult:
    """Builds a result from packed arrays. Raises ValueError if they do not match the samples."""
    answers = list(parts_of(packed.answer))
    lengths = np.diff(packed.offsets)
    if len(lengths) != len(answers) or (lengths < 0).any() or packed.offsets[0] != 0:
        raise ValueError("the offsets are not of these samples")
    entropy = packed.token_ids if packed.entropy is None else packed.entropy
    if len(entropy) != len(packed.token_ids):
        raise ValueError("the entropies are not of these tokens")
    if not packed.offsets[-1] == len(packed.token_ids) == len(packed.logprobs):
        raise ValueError("the offsets are not of these tokens")
    borders = packed.offsets[1:-1]
    parts = zip(
        answers,
        np.split(packed.token_ids, borders),
        np.split(packed.logprobs, borders),
        np.split(entropy, borders),
        # np.split returns one array even if there are no samples.
        strict=bool(answers),
    )
    return _result_of(packed.answer, (_part_with(*part) for part in parts))


def _result_of(answer: RolloutAnswer, parts: Iterator[Sample | Segment]) -> RolloutResult:
    """Assigns parts to groups; the parts come in the order of the answer."""
    groups = []
    for group in answer.groups:
        own = [next(parts) for _ in range(len(group.samples) + len(group.segments or ()))]
        samples = [part for part in own if isinstance(part, Sample)]
        groups.append(group_of(group, samples, [p for p in own if isinstance(p, Segment)]))
    return RolloutResult(
        id=answer.id,
        outcome=answer.outcome,
        groups=tuple(sorted(groups, key=lambda group: group.index)),
        usage=answer.usage,
    )


def _part_of(answer: Part) -> Sample | Segment:
    return sample_of(answer) if isinstance(answer, SampleAnswer) else segment_of(answer)


def _part_with(
    answer: Part, token_ids: ArrayLike, logprobs: ArrayLike, entropy: ArrayLike
) -> Sample | Segment:
    if isinstance(answer, SampleAnswer):
        return _sample_of(answer, token_ids, logprobs)
    return _segment_of(answer, token_ids, logprobs, entropy)


def _segment_of(
    answer: SegmentAnswer, token_ids: ArrayLike, logprobs: ArrayLike, entropy: ArrayLike
) -> Segment:
    has_entropy = answer.entropy is not None
    return Segment(
        id=answer.id,
        parent=answer.parent,
        depth=answer.depth,
        token_ids=np.array(token_ids, dtype=np.int64),
        logprobs=np.array(logprobs, dtype=np.float32),
        entropy=np.array(entropy, dtype=np.float32) if has_entropy else None,
        finish_reason=answer.finish_reason,
        num_leaves=answer.num_leaves or 0,
        versions=tuple(answer.versions),
        kv=answer.kv,
        kv_reason=answer.kv_reason,
    )


def _sample_of(answer: SampleAnswer, token_ids: ArrayLike, logprobs: ArrayLike) -> Sample:
    return Sample(
        index=answer.index,
        token_ids=np.array(token_ids, dtype=np.int64),
        logprobs=np.array(logprobs, dtype=np.float32),
        text=answer.text,
        finish_reason=answer.finish_reason,
        versions=tuple(answer.versions),
    )
