"""Rollout tree: segments that are shared by several paths."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from coppice.samples import Sample
from coppice.wire.kv import KvHandle, KvReason
from coppice.wire.rollouts import SegmentFinish, VersionSpan
from coppice.wire.version_spans import joined_spans


# NumPy's == is elementwise, so these dataclasses compare by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Node of a rollout tree: the tokens sampled between two branch points.

    logprobs[i] belongs to token_ids[i]. `parent` is None for a segment that starts at the prompt.
    Token indices in `versions` start at the segment's own first token. `depth` is the number of
    branch points above the segment, `num_leaves` the number of paths through it. `kv` is a handle
    to the KV of the path up to the segment's last token, if it was requested and is available.
    """

    id: str
    parent: str | None
    depth: int
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    entropy: NDArray[np.float32] | None
    finish_reason: SegmentFinish
    num_leaves: int
    versions: tuple[VersionSpan, ...]
    kv: KvHandle | None = None
    kv_reason: KvReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tree:
    """Segments, each after its parent, and the ids of the leaves."""

    segments: tuple[Segment, ...]
    leaves: tuple[str, ...]

    def segment(self, segment_id: str) -> Segment:
        """Returns the segment. Raises KeyError if there is none."""
        found = next((each for each in self.segments if each.id == segment_id), None)
        if found is None:
            raise KeyError(segment_id)
        return found

    def children(self, segment_id: str | None) -> tuple[Segment, ...]:
        """Child segments; for None, the segments that start at the prompt."""
        return tuple(each for each in self.segments if each.parent == segment_id)

    def path(self, segment_id: str) -> tuple[Segment, ...]:
        """Segments from the prompt to the given segment, inclusive."""
        by_id = {each.id: each for each in self.segments}
        path = [by_id[segment_id]]
        while path[-1].parent is not None:
            path.append(by_id[path[-1].parent])
        return tuple(path[::-1])

    def rows(self) -> tuple[Sample, ...]:
        """One sample per leaf, as if each path had been sampled separately."""
        return tuple(self._row(index, leaf) for index, leaf in enumerate(self.leaves))

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens; shared tokens count once."""
        return sum(len(segment.token_ids) for segment in self.segments)

    def _row(self, index: int, leaf: str) -> Sample:
        path = self.path(leaf)
        finish = path[-1].finish_reason
        return Sample(
            index=index,
            token_ids=np.concatenate([segment.token_ids for segment in path]),
            logprobs=np.concatenate([segment.logprobs for segment in path]),
            text=None,
            finish_reason="length" if finish == "cut" or finish == "budget" else finish,
            versions=tuple(joined_spans((s.versions, len(s.token_ids)) for s in path)),
        )


def tree_of(segments: Iterable[Segment], leaves: Sequence[str]) -> Tree:
    """Builds a tree without the segments that lead to no leaf, which were dropped.

    Raises ValueError if a segment is missing.
    """
    by_id = {segment.id: segment for segment in segments}
    shared: Counter[str] = Counter()
    for leaf in leaves:
        at: str | None = leaf
        while at is not None:
            if at not in by_id:
                raise ValueError(f"the tree lacks the segment {at}")
            shared[at] += 1
            at = by_id[at].parent
    kept = [replace(s, num_leaves=shared[s.id]) for s in by_id.values() if shared[s.id]]
    return Tree(segments=tuple(kept), leaves=tuple(leaves))
