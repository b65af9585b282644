"""Tree of an agent session, whose paths are exactly the tokens that the engine has read.

Owned by the session; it has no I/O and no clock. A segment has tokens that the policy sampled, or
context: tokens of prompts, tool results and chat templates. Context is shared by all prompts that
begin with it. Samples are never merged, even if they have the same tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from coppice.wire.columns.token_columns import TokenColumns, TokenLists
from coppice.wire.rollouts import GroupAnswer, Outcome, SegmentAnswer, SegmentFinish
from service.rollouts.trees.segment_tree import COMPLETE_FINISHES
from service.sessions.segment import (
    Attached,
    Attachment,
    Segment,
    TokenArray,
    descendants,
    num_common,
    start_after,
)

MIN_SHARED_TOKENS = 64
"""Tokens that a prompt must share with the start of a tree, to be a branch of it."""


@dataclass(frozen=True, slots=True)
class _Match:
    """Longest common prefix of a prompt and a path: it ends after `num_matched` of `segment`."""

    segment: Segment | None = None
    num_matched: int = 0
    total: int = 0


class SessionTree:
    """Segments of one session; `prefix` makes their ids unique. It may have several roots."""

    def __init__(self, prefix: str, *, min_shared_tokens: int = MIN_SHARED_TOKENS) -> None:
        self.prefix = prefix
        self._min_shared_tokens = min_shared_tokens
        self._roots: list[Segment] = []
        self._num_ids = 0
        self.num_segments = 0
        self.num_sampled_tokens = 0
        self.num_context_tokens = 0

    @classmethod
    def restored(cls, prefix: str, segments: Iterable[Segment], *, num_ids: int) -> "SessionTree":
        """Tree with the segments of another one, whose parents precede their children."""
        tree = cls(prefix)
        tree._num_ids = num_ids
        for segment in segments:
            parent = segment.parent
            (tree._roots if parent is None else parent.children).append(segment)
            tree._count(segment, is_sample=segment.sample is not None)
        return tree

    @property
    def num_ids(self) -> int:
        """Number of ids that segments have had, also those that were removed."""
        return self._num_ids

    @property
    def num_tokens(self) -> int:
        return self.num_sampled_tokens + self.num_context_tokens

    def token_ids(self, segment: Segment) -> list[int]:
        """Tokens of the path from the root to the end of a segment."""
        path = [each.token_ids for each in segment.path()]
        tokens: list[int] = np.concatenate(path).tolist()
        return tokens

    def attach(self, prompt: Sequence[int], preferred: Segment | None = None) -> Attachment:
        """Add the tokens of a prompt that are not in the tree; the call's sample follows them.

        If the prompt begins with the path to `preferred`, it is attached below; else to the longest
        path that it begins with, of equal ones to the latest. Each attachment must be followed by
        one `add_sample` or `detach`.
        """
        tokens = np.asarray(prompt, np.int32)
        assert len(tokens), "a prompt has tokens"
        match = self._longest_match(tokens, preferred)
        if not self._joins(match, tokens):
            match = _Match()
        parent, attached = self._end_of(match)
        num_new = len(tokens) - match.total
        if parent is None or num_new:
            parent = self._add(parent, tokens[match.total :])
        parent.num_calls += 1
        parent.num_prompts += 1
        return Attachment(
            parent=parent,
            attached=attached,
            is_repeated=parent.num_prompts > 1,
            num_prompt_tokens=len(tokens),
            num_new_context_tokens=num_new,
        )

    def add_sample(
        self,
        attachment: Attachment,
        tokens: TokenLists,
        finish: SegmentFinish = "stop",
        stop_reason: int | str | None = None,
        *,
        num_cached_tokens: int = 0,
    ) -> Segment | None:
        """Add the tokens that a call has sampled, and end the call; None if there are no tokens."""
        if not tokens.token_ids:
            self.detach(attachment)
            return None
        attachment.parent.num_calls -= 1
        own = np.asarray(tokens.token_ids, np.int32)
        segment = self._add(attachment.parent, own, is_sample=True)
        segment.sample = tokens
        segment.finish, segment.stop_reason = finish, stop_reason
        segment.num_cached_tokens = num_cached_tokens
        return segment

    def detach(self, attachment: Attachment) -> None:
        """End a call that has sampled nothing, and remove context that no other call has."""
        attachment.parent.num_calls -= 1
        attachment.parent.num_prompts -= 1
        segment: Segment | None = attachment.parent
        while segment is not None and segment.sample is None and segment.is_leaf:
            siblings = self._roots if segment.parent is None else segment.parent.children
            siblings.remove(segment)
            self.num_segments -= 1
            self.num_context_tokens -= len(segment.token_ids)
            segment = segment.parent

    def segments(self) -> Iterator[Segment]:
        """All segments; parents precede their children."""
        return descendants(self._roots)

    def answer(self, *, is_complete: bool = True) -> list[GroupAnswer]:
        """One tree per root, in the order of `attach`, without the prompts of running calls.

        The prompt is the root's own tokens. Supports are encoded here, which may take milliseconds.
        """
        groups: list[GroupAnswer] = []
        for root in self._roots:
            leaves = _num_leaves(root)
            if leaves[root]:
                groups.append(self._group(len(groups), root, leaves, is_complete=is_complete))
        return groups

    def _group(
        self, index: int, root: Segment, leaves: dict[Segment, int], *, is_complete: bool
    ) -> GroupAnswer:
        kept = [each for each in descendants(root.children) if leaves[each]]
        ends = [each for each in kept if not any(leaves[child] for child in each.children)]
        depths = {root: -1}
        for each in kept:
            assert each.parent is not None, "only roots have no parent"
            depths[each] = depths[each.parent] + 1
        first = next(each for each in kept if each.sample is not None)
        return GroupAnswer(
            id=root.id,
            index=index,
            outcome=_outcome(ends),
            num_prompt_tokens=len(root.token_ids),
            prompt_token_ids=root.token_ids.tolist(),
            num_cached_tokens=min(first.num_cached_tokens, len(root.token_ids)),
            leaves=[each.id for each in ends],
            samples=[],
            segments=[
                segment_answer(each, root, depths[each], leaves[each] if is_complete else None)
                for each in kept
            ],
        )

    def _joins(self, match: _Match, prompt: TokenArray) -> bool:
        """True if the prompt belongs to the matched tree, and is not the root of a new one."""
        root = match.segment
        if root is None or root.parent is not None:
            return root is not None
        whole = (len(prompt), len(root.token_ids), self._min_shared_tokens)
        return match.total >= min(whole)

    def _longest_match(self, prompt: TokenArray, preferred: Segment | None) -> _Match:
        waiting = [(root, 0) for root in self._roots]
        if preferred is not None and (start := start_after(preferred, prompt)) is not None:
            waiting = [(preferred, start)]
        best = _Match()
        while waiting:
            segment, start = waiting.pop()
            num = num_common(segment.token_ids, prompt[start:])
            if start + num > best.total:
                best = _Match(segment, num, start + num)
            if num == len(segment.token_ids):
                waiting += [(child, start + num) for child in segment.children]
        return best

    def _end_of(self, match: _Match) -> tuple[Segment | None, Attached]:
        """The segment that ends where the match ends, which may have to be split."""
        segment = match.segment
        if segment is None:
            return None, "root"
        if match.num_matched < len(segment.token_ids):
            return self._split(segment, match.num_matched), "branched"
        return segment, "extended" if segment.is_leaf else "branched"

    def _split(self, segment: Segment, num_tokens: int) -> Segment:
        """Move a segment's first tokens to a new parent of it."""
        head = Segment(
            id=self._next_id(),
            token_ids=segment.token_ids[:num_tokens],
            parent=segment.parent,
            children=[segment],
            num_cached_tokens=segment.num_cached_tokens,
        )
        siblings = self._roots if segment.parent is None else segment.parent.children
        siblings[siblings.index(segment)] = head
        if segment.sample is not None:
            length = len(segment.token_ids)
            head.sample = segment.sample.part(0, num_tokens)
            segment.sample = segment.sample.part(num_tokens, length)
        segment.token_ids = segment.token_ids[num_tokens:]
        segment.parent = head
        self.num_segments += 1
        return head

    def _add(
        self, parent: Segment | None, tokens: TokenArray, *, is_sample: bool = False
    ) -> Segment:
        segment = Segment(id=self._next_id(), token_ids=tokens, parent=parent)
        (self._roots if parent is None else parent.children).append(segment)
        self._count(segment, is_sample=is_sample)
        return segment

    def _count(self, segment: Segment, *, is_sample: bool) -> None:
        self.num_segments += 1
        if is_sample:
            self.num_sampled_tokens += len(segment.token_ids)
        else:
            self.num_context_tokens += len(segment.token_ids)

    def _next_id(self) -> str:
        self._num_ids += 1
        return f"{self.prefix}.{self._num_ids - 1}"


def _num_leaves(root: Segment) -> dict[Segment, int]:
    """Number of leaves at and below each segment; a leaf is a sample that no sample follows."""
    found: dict[Segment, int] = {}
    for segment in reversed(list(descendants([root]))):
        below = sum(found[child] for child in segment.children)
        found[segment] = below or int(segment.sample is not None)
    return found


def _outcome(leaves: Sequence[Segment]) -> Outcome:
    finishes = [leaf.finish for leaf in leaves]
    if all(finish in COMPLETE_FINISHES for finish in finishes):
        return "done"
    return "failed" if set(finishes) == {"error"} else "partial"


def segment_answer(
    segment: Segment, root: Segment | None = None, depth: int = 0, num_leaves: int | None = None
) -> SegmentAnswer:
    """Answer of a segment; those directly below `root` have no parent."""
    sample = segment.sample
    tokens = sample or TokenColumns(token_ids=segment.token_ids.tolist(), logprobs=[], versions=())
    return SegmentAnswer(
        **tokens.wire_fields(SegmentAnswer),
        id=segment.id,
        parent=None if segment.parent in (None, root) else segment.parent.id,
        depth=depth,
        finish_reason=segment.finish,
        stop_reason=segment.stop_reason,
        num_leaves=num_leaves,
        sampled=sample is not None,
    )
