"""Tree of a rollout, whose nodes are segments: the tokens between two cuts of a path.

Owned by the tree group. Parents precede their children. Segments are immutable once added.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from coppice.wire.columns.token_columns import TokenColumns, TokenLists
from coppice.wire.rollouts import SegmentAnswer, SegmentFinish
from service.errors import SegmentNotFound
from service.rollouts.sample_answer import answer_fields

COMPLETE_FINISHES: Collection[SegmentFinish] = frozenset({"stop", "length", "budget"})
"""Finish reasons of a path that ended by itself; the token budget is a limit like any other."""


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
    tokens: TokenLists
    finish: SegmentFinish
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LeafPath:
    """Tokens of all segments from the prompt to a leaf, joined like the tokens of one sample."""

    leaf: Segment
    tokens: TokenLists


class Tree:
    """Segments of one rollout tree; `prefix` makes their ids unique within the rollout."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._segments: dict[str, Segment] = {}
        self._answers: dict[str, SegmentAnswer] = {}
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
        tokens: TokenLists,
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
            self._answers.pop(segment_id, None)
        self.num_dropped += len(segment_ids)

    def segments(self) -> list[Segment]:
        return list(self._segments.values())

    async def answer(self, segment: Segment, num_leaves: int | None = None) -> SegmentAnswer:
        """Answer of a segment, whose columns are encoded once."""
        found = self._answers.get(segment.id)
        if found is None:
            found = SegmentAnswer(
                **await answer_fields(segment.tokens, SegmentAnswer),
                id=segment.id,
                parent=segment.parent,
                depth=segment.depth,
                finish_reason=segment.finish,
                stop_reason=segment.stop_reason,
            )
            if segment.id in self._segments:
                self._answers[segment.id] = found
        return found.model_copy(update={"num_leaves": num_leaves})

    async def answers(self) -> list[SegmentAnswer]:
        shared = Counter(each.id for leaf in self.leaves() for each in self.path(leaf))
        return [await self.answer(segment, shared[segment.id]) for segment in self.segments()]

    def rows(self) -> list[LeafPath]:
        return [self._row(leaf) for leaf in self.leaves()]

    def _row(self, leaf: Segment) -> LeafPath:
        return LeafPath(leaf, TokenColumns.joined(segment.tokens for segment in self.path(leaf)))
