"""Result types of rollouts (samples, tree segments, groups) with token data as numpy arrays.

The arrays are writable and have no other owner, so torch.from_numpy takes them without a copy.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coppice.wire.chat import ParsedMessage
from coppice.wire.columns.logprobs import PromptLogprobs
from coppice.wire.columns.token_columns import TokenArrays, TokenColumns, columns_of
from coppice.wire.kv_reuse import KvReuseAnswer
from coppice.wire.packed.results import Packed, Part, parts_of
from coppice.wire.prompt_kv import KvHandle, KvReason
from coppice.wire.rollouts import (
    FinishReason,
    GroupHead,
    Outcome,
    RolloutAnswer,
    SampleAnswer,
    SegmentAnswer,
    SegmentFinish,
    Usage,
)

_FINISHED = frozenset({"stop", "length", "error"})


# NumPy's == is elementwise, so these dataclasses compare by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample(TokenColumns[NDArray[np.int64], NDArray[np.float32]]):
    """One finished sample (response) of a prompt.

    logprobs[i] belongs to token_ids[i]. `versions` gives the weights version of each token, as
    ranges of token indices, `kv_versions` that of the KV that the tokens were conditioned on, as
    ranges of positions in prompt and response. `stop_reason` is the stop string or stop token that
    ended the sample. support[i] are the ids that token i was sampled from, if `return_support` was
    set. `top_logprobs`, `given_logprobs`, `raw_logprobs` and `routed_experts` are present if they
    were requested.
    """

    index: int
    text: str | None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    message: ParsedMessage | None = None

    def token_versions(self) -> list[str]:
        """Weights version that generated each token of the sample."""
        return [span.version for span in self.versions for _ in range(span.start, span.end)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment(TokenColumns[NDArray[np.int64], NDArray[np.float32]]):
    """Node of a rollout tree: the tokens sampled between two branch points.

    logprobs[i] belongs to token_ids[i]. `parent` is None for a segment that starts at the prompt.
    Token indices in `versions` start at the segment's own first token, as do those of `support`,
    the ids that each token was sampled from. Positions in `kv_versions` start with the prompt.
    `depth` is the number of branch points above the
    segment, `num_leaves` the number of paths through it. `kv` is a handle to the KV of the path up
    to the segment's last token, if it was requested and is available. A segment that is not
    `sampled` has context of an agent session, such as a tool's result, and no logprobs or versions.
    """

    id: str
    parent: str | None
    depth: int
    finish_reason: SegmentFinish
    num_leaves: int
    stop_reason: int | str | None = None
    kv: KvHandle | None = None
    kv_reason: KvReason | None = None
    sampled: bool = True

    def token_logprobs(self) -> NDArray[np.float32]:
        """One logprob per token; NaN for tokens that were not sampled."""
        return self.logprobs if self.sampled else np.full(len(self.token_ids), np.nan, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tree:
    """Rollout tree: its segments, each after its parent, and the ids of its leaf segments.

    `is_session`: the tree of an agent session. All sampled children of a cut sample continue it in
    other trees, and only the first one in this.
    """

    segments: tuple[Segment, ...]
    leaves: tuple[str, ...]
    is_session: bool = False

    def continuations(self) -> frozenset[str]:
        """Ids of the segments with the further tokens of a sample that their parent begins."""
        cut = {each.id for each in self.segments if each.sampled and each.finish_reason == "cut"}
        below = [each for each in self.segments if each.parent in cut]
        first = {each.parent: each.id for each in reversed(below)}
        return frozenset(first.values() if self.is_session else (each.id for each in below))

    def segment(self, segment_id: str) -> Segment:
        """Returns the segment with this id. Raises KeyError if there is none."""
        found = next((each for each in self.segments if each.id == segment_id), None)
        if found is None:
            raise KeyError(segment_id)
        return found

    def children(self, segment_id: str | None) -> tuple[Segment, ...]:
        """Child segments of a segment; for None, the segments that start at the prompt."""
        return tuple(each for each in self.segments if each.parent == segment_id)

    def path(self, segment_id: str) -> tuple[Segment, ...]:
        """Segments on the path from the prompt to the given segment, inclusive."""
        by_id = {each.id: each for each in self.segments}
        path = [by_id[segment_id]]
        while path[-1].parent is not None:
            path.append(by_id[path[-1].parent])
        return tuple(path[::-1])

    def rows(self) -> tuple[Sample, ...]:
        """One sample per leaf of the tree, as if each path had been sampled separately.

        Tokens of context have NaN as their logprob.
        """
        return tuple(self._row(index, leaf) for index, leaf in enumerate(self.leaves))

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens of the tree; tokens shared by several paths count once."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.sampled)

    def _row(self, index: int, leaf: str) -> Sample:
        path = self.path(leaf)
        finish = path[-1].finish_reason
        return Sample(
            **TokenColumns.joined(path).columns(),
            index=index,
            text=None,
            finish_reason="length" if finish == "cut" or finish == "budget" else finish,
            stop_reason=path[-1].stop_reason,
        )


def tree_of(segments: Iterable[Segment], leaves: Sequence[str]) -> Tree:
    """Builds a rollout tree without its dropped segments, which are those that lead to no leaf.

    Raises ValueError if a segment is missing.
    """
    by_id = {segment.id: segment for segment in segments}
    shared: Counter[str] = Counter()
    for leaf in leaves:
        at: str | None = leaf
        while at is not None:
            if at not in by_id:
                raise ValueError(f"the tree has no segment {at}")
            shared[at] += 1
            at = by_id[at].parent
    kept = [replace(s, num_leaves=shared[s.id]) for s in by_id.values() if shared[s.id]]
    return Tree(segments=tuple(kept), leaves=tuple(leaves))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """One prompt with its samples, ordered by index, or with its rollout tree.

    A tree requested with flatten=True also has samples: one per leaf, the tokens from the prompt
    to that leaf. `num_dropped` counts the segments that the caller removed from an externally grown
    tree. `selected` holds the indices of the samples that Finish(num_samples=...) selected, or None
    if there was no selection. If `exact` is False, the samples come from an approximation of the
    prompt's KV: recompute their logprobs and apply importance weights. `kv_reuse` reports how much
    of a prompt given as spans was prefilled.
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
    selected: tuple[int, ...] | None = None
    kv_reuse: KvReuseAnswer | None = None
    prompt_logprobs: PromptLogprobs | None = None
    """Logprobs of the prompt's tokens, if they were requested."""
    prompt_token_ids: NDArray[np.int64] | None = None
    num_images: int = 0
    """Images in the prompt, which its token ids alone do not have."""

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
    return _sample_of(answer, columns_of(answer).arrays())


def segment_of(answer: SegmentAnswer) -> Segment:
    return _segment_of(answer, columns_of(answer).arrays())


def group_of(head: GroupHead, samples: Iterable[Sample], segments: Iterable[Segment]) -> Group:
    """Builds the result of one group. Raises ValueError if a tree lacks a segment."""
    given = head.prompt_token_ids
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
        selected=None if head.selected is None else tuple(head.selected),
        kv_reuse=head.kv_reuse,
        prompt_logprobs=head.prompt_logprobs,
        prompt_token_ids=None if given is None else np.array(given, dtype=np.int64),
        num_images=head.num_images,
    )


def result_of(answer: RolloutAnswer) -> RolloutResult:
    return _result_of(
        answer, (_part_of(part, columns_of(part).arrays()) for part in parts_of(answer))
    )


def result_of_packed(packed: Packed) -> RolloutResult:
    """Builds a rollout result from packed arrays."""
    parts = zip(parts_of(packed.answer), packed.columns, strict=True)
    return _result_of(packed.answer, (_part_of(*part) for part in parts))


def _result_of(answer: RolloutAnswer, parts: Iterator[Sample | Segment]) -> RolloutResult:
    """Builds a rollout result from samples and segments in the order of the server's answer."""
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


def _part_of(answer: Part, columns: TokenArrays) -> Sample | Segment:
    if isinstance(answer, SampleAnswer):
        return _sample_of(answer, columns)
    return _segment_of(answer, columns)


def _segment_of(answer: SegmentAnswer, columns: TokenArrays) -> Segment:
    if not answer.sampled:
        columns = replace(columns, logprobs=np.zeros(0, np.float32))
    return Segment(
        **columns.columns(),
        id=answer.id,
        parent=answer.parent,
        depth=answer.depth,
        finish_reason=answer.finish_reason,
        num_leaves=answer.num_leaves or 0,
        stop_reason=answer.stop_reason,
        kv=answer.kv,
        kv_reason=answer.kv_reason,
        sampled=answer.sampled,
    )


def _sample_of(answer: SampleAnswer, columns: TokenArrays) -> Sample:
    return Sample(
        **columns.columns(),
        index=answer.index,
        text=answer.text,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        message=answer.message,
    )
