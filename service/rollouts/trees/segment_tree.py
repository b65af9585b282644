"""Tree of a rollout, whose nodes are segments: the tokens between two cuts of a path.

Owned by the tree group. Parents precede their children. Segments are immutable once added.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from coppice.wire.kv_versions import KvVersionSpan, cut_kv_versions, joined_kv_versions
from coppice.wire.logprobs import TokenLogprobs, joined_logprobs
from coppice.wire.rollouts import SegmentAnswer, SegmentFinish, VersionSpan
from coppice.wire.support import SupportAnswer
from coppice.wire.version_span_slicing import cut_spans, joined_spans
from engine.types import Completion
from service.errors import SegmentNotFound
from service.rollouts.group_options import GroupOptions
from service.rollouts.sample_answer import AnswerTables, wire_kv_versions, wire_spans
from service.rollouts.supports import Supports, joined, support_of
from service.rollouts.trees.plan import Plan

COMPLETE_FINISHES: Collection[SegmentFinish] = frozenset({"stop", "length", "budget"})
"""Finish reasons of a path that ended by itself; the token budget is a limit like any other."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GeneratedTokens:
    """Generated tokens with logprobs, versions and, if requested, entropies and supports."""

    token_ids: list[int]
    logprobs: list[float]
    entropy: list[float] | None
    versions: list[VersionSpan]
    support: Supports | None
    kv_versions: list[KvVersionSpan] = field(default_factory=list)
    top_logprobs: TokenLogprobs | None = None
    given_logprobs: TokenLogprobs | None = None
    raw_logprobs: list[float] | None = None

    def part(self, start: int, end: int) -> "GeneratedTokens":
        return GeneratedTokens(
            token_ids=self.token_ids[start:end],
            logprobs=self.logprobs[start:end],
            entropy=None if self.entropy is None else self.entropy[start:end],
            versions=cut_spans(self.versions, start, end),
            kv_versions=cut_kv_versions(self.kv_versions, len(self.token_ids), start, end),
            top_logprobs=self.top_logprobs and self.top_logprobs.part(start, end),
            given_logprobs=self.given_logprobs and self.given_logprobs.part(start, end),
            raw_logprobs=None if self.raw_logprobs is None else self.raw_logprobs[start:end],
            support=None if self.support is None else self.support.part(start, end),
        )

    def pieces(self, cuts: Sequence[int]) -> list["GeneratedTokens"]:
        """Split the tokens at the given positions, which are ascending and not at the ends."""
        borders = [0, *cuts, len(self.token_ids)]
        return [self.part(start, end) for start, end in zip(borders, borders[1:], strict=False)]


def joined_tokens(parts: Sequence[GeneratedTokens]) -> GeneratedTokens:
    """Tokens of consecutive parts. A list that one of the parts lacks is missing in the result."""
    return GeneratedTokens(
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=[logprob for part in parts for logprob in part.logprobs],
        entropy=_concatenated(part.entropy for part in parts),
        versions=joined_spans((part.versions, len(part.token_ids)) for part in parts),
        kv_versions=joined_kv_versions((part.kv_versions, len(part.token_ids)) for part in parts),
        top_logprobs=joined_logprobs(part.top_logprobs for part in parts),
        given_logprobs=joined_logprobs(part.given_logprobs for part in parts),
        raw_logprobs=_concatenated(part.raw_logprobs for part in parts),
        support=joined(part.support for part in parts),
    )


def _concatenated(parts: Iterable[list[float] | None]) -> list[float] | None:
    found = list(parts)
    known = [part for part in found if part is not None]
    return [*chain.from_iterable(known)] if len(known) == len(found) else None


def tokens_from_completion(
    plan: Plan,
    result: Completion,
    options: GroupOptions,
    tables: AnswerTables,
) -> GeneratedTokens:
    return GeneratedTokens(
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        entropy=_entropy(plan, result),
        versions=wire_spans(result.versions, options.adapter),
        kv_versions=wire_kv_versions(result),
        support=support_of(result.support, options.support_vocab_size),
        raw_logprobs=result.raw_logprobs,
        **tables,
    )


def _entropy(plan: Plan, result: Completion) -> list[float] | None:
    if not plan.needs_entropy:
        return None
    if plan.entropy.source == "sampled_token":
        return [-logprob for logprob in result.logprobs]
    return result.entropy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Node of a rollout tree: the tokens between two cuts, and the reason why they end there.

    `depth` is the number of splits between the prompt and the segment. `name` is deterministic: the
    same for every run that grows the same tree.
    """

    id: str
    name: str
    parent: str | None
    depth: int
    tokens: GeneratedTokens
    finish: SegmentFinish
    stop_reason: int | str | None = None

    def answer(self, support: SupportAnswer | None, num_leaves: int | None) -> SegmentAnswer:
        return SegmentAnswer(
            id=self.id,
            parent=self.parent,
            depth=self.depth,
            token_ids=self.tokens.token_ids,
            logprobs=self.tokens.logprobs,
            support=support,
            entropy=self.tokens.entropy,
            finish_reason=self.finish,
            stop_reason=self.stop_reason,
            num_leaves=num_leaves,
            versions=self.tokens.versions,
            kv_versions=self.tokens.kv_versions,
            top_logprobs=self.tokens.top_logprobs,
            given_logprobs=self.tokens.given_logprobs,
            raw_logprobs=self.tokens.raw_logprobs,
        )


@dataclass(frozen=True, slots=True, eq=False)
class LeafPath:
    """Tokens of all segments from the prompt to a leaf, joined like the tokens of one sample."""

    leaf: Segment
    tokens: GeneratedTokens


class Tree:
    """Segments of one rollout tree; `prefix` makes their ids unique within the rollout."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._segments: dict[str, Segment] = {}
        self._supports: dict[str, SupportAnswer] = {}
        self._num_added = 0
        self.num_dropped = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.tokens.token_ids) for segment in self._segments.values())

    def get_segment(self, segment_id: str | None) -> Segment | None:
        """Find a segment of the tree by its id; the id None stands for the prompt."""
        if segment_id is None:
            return None
        if segment_id not in self._segments:
            raise SegmentNotFound()
        return self._segments[segment_id]

    def add(
        self,
        parent: Segment | None,
        depth: int,
        name: str,
        tokens: GeneratedTokens,
        finish: SegmentFinish,
        stop_reason: int | str | None = None,
    ) -> Segment:
        segment = Segment(
            id=f"{self._prefix}.{self._num_added}",
            name=name,
            parent=None if parent is None else parent.id,
            depth=depth,
            tokens=tokens,
            finish=finish,
            stop_reason=stop_reason,
        )
        assert segment.parent is None or segment.parent in self._segments, "no such parent"
        self._num_added += 1
        self._segments[segment.id] = segment
        return segment

    def path(self, segment: Segment | None) -> list[Segment]:
        """Segments on the way from the prompt to the given segment, inclusive."""
        path: list[Segment] = []
        while segment is not None:
            path.append(segment)
            segment = None if segment.parent is None else self._segments[segment.parent]
        return path[::-1]

    def token_ids(self, segment: Segment | None) -> list[int]:
        return [token for each in self.path(segment) for token in each.tokens.token_ids]

    def leaves(self) -> list[Segment]:
        parents = {segment.parent for segment in self._segments.values()}
        return [segment for segment in self._segments.values() if segment.id not in parents]

    def descendants(self, segment: Segment) -> set[str]:
        """Ids of a segment and of all its descendants in the tree."""
        found = {segment.id}
        for each in self._segments.values():
            if each.parent in found:
                found.add(each.id)
        return found

    def drop(self, segment_ids: set[str]) -> None:
        for segment_id in segment_ids:
            del self._segments[segment_id]
            self._supports.pop(segment_id, None)
        self.num_dropped += len(segment_ids)

    def segments(self) -> list[Segment]:
        return list(self._segments.values())

    async def answer(self, segment: Segment, num_leaves: int | None = None) -> SegmentAnswer:
        """Answer of a segment, whose supports are encoded once."""
        support = self._supports.get(segment.id)
        if support is None and segment.tokens.support is not None:
            support = await segment.tokens.support.encoded()
            if segment.id in self._segments:
                self._supports[segment.id] = support
        return segment.answer(support, num_leaves)

    async def answers(self) -> list[SegmentAnswer]:
        shared = Counter(each.id for leaf in self.leaves() for each in self.path(leaf))
        return [await self.answer(segment, shared[segment.id]) for segment in self.segments()]

    def rows(self) -> list[LeafPath]:
        return [self._row(leaf) for leaf in self.leaves()]

    def _row(self, leaf: Segment) -> LeafPath:
        return LeafPath(leaf, joined_tokens([segment.tokens for segment in self.path(leaf)]))
