"""Segment (node) of a token tree, and the attachment of a prompt to it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coppice.wire.columns.token_columns import TokenLists
from coppice.wire.columns.weights_version_spans import VersionSpan
from coppice.wire.rollouts import SegmentAnswer, SegmentFinish

TokenArray = NDArray[np.int32]
Attached = Literal["extended", "branched", "root"]


@dataclass(eq=False, slots=True, kw_only=True)
class Segment:
    """Node of a token tree. Its end never moves: a split moves its first tokens to a parent.

    `sample` is None for context. `depth` is one more than that of the parent. Segments of rollout
    trees have a `name` that is the same for every run that grows the same tree, and keep their
    `answer`, which the log has, too. `num_prompts` is the number of prompts that end with the
    segment, and `num_calls` the number of them whose calls run.
    """

    id: str
    token_ids: TokenArray
    name: str = ""
    depth: int = -1
    parent: "Segment | None" = None
    children: "list[Segment]" = field(default_factory=list)
    sample: TokenLists | None = None
    finish: SegmentFinish = "cut"
    stop_reason: int | str | None = None
    answer: SegmentAnswer | None = None
    num_cached_tokens: int = 0
    num_prompts: int = 0
    num_calls: int = 0

    @property
    def is_leaf(self) -> bool:
        return not self.children and not self.num_calls

    @property
    def parent_id(self) -> str | None:
        """Id of the parent; None for a root, and below the prompt of a rollout."""
        return None if self.parent is None else self.parent.id or None

    @property
    def versions(self) -> Sequence[VersionSpan]:
        return () if self.sample is None else self.sample.versions

    @property
    def end(self) -> int:
        """Number of tokens from the root to the end of the segment."""
        return sum(len(each.token_ids) for each in self.path())

    def path(self) -> "list[Segment]":
        """Segments from the root to this one, inclusive."""
        path: list[Segment] = []
        segment: Segment | None = self
        while segment is not None:
            path.append(segment)
            segment = segment.parent
        return path[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Place of a call's prompt in the tree: `parent` ends where the prompt ends.

    `attached`: extended after a leaf, branched from an inner token, or the root of a new tree.
    `is_repeated`: another call had the same prompt. Of the prompt's tokens `num_new_context_tokens`
    were not in the tree.
    """

    parent: Segment
    attached: Attached
    is_repeated: bool
    num_new_context_tokens: int


def descendants(segments: Sequence[Segment]) -> Iterator[Segment]:
    """The given segments and all below them, in the order of a depth-first search."""
    waiting = list(reversed(segments))
    while waiting:
        segment = waiting.pop()
        yield segment
        waiting += reversed(segment.children)


def num_common(one: TokenArray, other: TokenArray) -> int:
    """Length of the longest common prefix."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def start_after(segment: Segment, prompt: TokenArray) -> int | None:
    """Index of the segment's first token in the prompt; None if it does not begin with the path."""
    start = total = 0
    for each in segment.path():
        start, total = total, total + len(each.token_ids)
        if not np.array_equal(each.token_ids, prompt[start:total]):
            return None
    return start
