"""Data structure of a token tree: adds samples, and merges prompts at shared prefixes.

Its paths are exactly the tokens that the engine has read. It has no I/O and no clock. A segment has
tokens that the policy sampled, or context: tokens of prompts, tool results and chat templates.
Context is shared by all prompts that begin with it. Samples are never merged, even if they have the
same tokens. In a session prompts are attached to the tree; that of a rollout grows below its one
prompt.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from coppice.wire.columns.token_columns import TokenLists
from coppice.wire.rollouts import GroupAnswer, SegmentFinish
from service.rollouts.trees.segment import (
    Attached,
    Attachment,
    Segment,
    TokenArray,
    descendants,
    num_common,
    start_after,
)
from service.rollouts.trees.tree_answer import root_answer, with_samples

MIN_SHARED_TOKENS = 64
"""Tokens that a prompt must share with the start of a tree, to be a branch of it."""


@dataclass(frozen=True, slots=True)
class _Match:
    """Longest common prefix of a prompt and a path: it ends after `num_matched` of `segment`."""

    segment: Segment | None = None
    num_matched: int = 0
    total: int = 0


class TokenTree:
    """Segments of one tree; `prefix` makes their ids unique. A session may have several roots.

    `by_id` has the segments in the order in which they were added. `num_ids` counts the ids that
    segments have had, also those that were removed, and `num_dropped` those that were dropped.
    """

    def __init__(self, prefix: str, *, min_shared_tokens: int = MIN_SHARED_TOKENS) -> None:
        self.prefix = prefix
        self._min_shared_tokens = min_shared_tokens
        self._roots: list[Segment] = []
        self.by_id: dict[str, Segment] = {}
        self.num_ids = 0
        self.num_dropped = 0
        self.num_sampled_tokens = 0
        self.num_context_tokens = 0

    @classmethod
    def restored(cls, prefix: str, segments: Iterable[Segment], *, num_ids: int) -> "TokenTree":
        """Tree with the segments of another one, whose parents precede their children."""
        tree = cls(prefix)
        tree.num_ids = num_ids
        for segment in segments:
            tree._insert(segment)
        return tree

    @property
    def num_segments(self) -> int:
        return len(self.by_id)

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
            added = Segment(id=self._next_id(), token_ids=tokens[match.total :], parent=parent)
            parent = self._insert(added)
        parent.num_calls += 1
        parent.num_prompts += 1
        return Attachment(
            parent=parent,
            attached=attached,
            is_repeated=parent.num_prompts > 1,
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
        segment = self.add(attachment.parent, tokens, finish, stop_reason)
        segment.num_cached_tokens = num_cached_tokens
        return segment

    def add(
        self,
        parent: Segment,
        tokens: TokenLists,
        finish: SegmentFinish,
        stop_reason: int | str | None = None,
        *,
        name: str = "",
    ) -> Segment:
        """Add sampled tokens below a segment."""
        assert parent.parent is None or parent.id in self.by_id, "no such parent"
        segment = Segment(
            id=self._next_id(),
            name=name,
            token_ids=np.asarray(tokens.token_ids, np.int32),
            parent=parent,
            sample=tokens,
            finish=finish,
            stop_reason=stop_reason,
        )
        return self._insert(segment)

    def detach(self, attachment: Attachment) -> None:
        """End a call that has sampled nothing, and remove context that no other call has."""
        attachment.parent.num_calls -= 1
        attachment.parent.num_prompts -= 1
        segment: Segment | None = attachment.parent
        while segment is not None and segment.sample is None and segment.is_leaf:
            self._remove(segment)
            segment = segment.parent

    def drop(self, segment: Segment) -> set[str]:
        """Remove a segment and all segments below it; returns their ids."""
        dropped = list(descendants([segment]))
        for each in reversed(dropped):
            self._remove(each)
        self.num_dropped += len(dropped)
        return {each.id for each in dropped}

    def segments(self) -> Iterator[Segment]:
        """All segments; parents precede their children."""
        return descendants(self._roots)

    def answer(self, *, is_complete: bool = True) -> list[GroupAnswer]:
        """One tree per root, in the order of `attach`, without the prompts of running calls.

        The prompt is the root's own tokens. Supports are encoded here, which may take milliseconds.
        """
        groups: list[GroupAnswer] = []
        for root in self._roots:
            if segments := with_samples(root):
                groups.append(root_answer(len(groups), root, segments, is_complete=is_complete))
        return groups

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
            depth=segment.depth,
            parent=segment.parent,
            children=[segment],
            num_cached_tokens=segment.num_cached_tokens,
        )
        siblings = self._siblings(segment)
        siblings[siblings.index(segment)] = head
        self.by_id[head.id] = head
        if segment.sample is not None:
            length = len(segment.token_ids)
            head.sample = segment.sample.part(0, num_tokens)
            segment.sample = segment.sample.part(num_tokens, length)
        segment.token_ids = segment.token_ids[num_tokens:]
        segment.parent = head
        for each in descendants([segment]):
            each.depth += 1
        return head

    def _insert(self, segment: Segment) -> Segment:
        if segment.parent is not None:
            segment.depth = segment.parent.depth + 1
        self._siblings(segment).append(segment)
        self.by_id[segment.id] = segment
        self._count(segment, 1)
        return segment

    def _remove(self, segment: Segment) -> None:
        self._siblings(segment).remove(segment)
        del self.by_id[segment.id]
        self._count(segment, -1)

    def _siblings(self, segment: Segment) -> list[Segment]:
        return self._roots if segment.parent is None else segment.parent.children

    def _count(self, segment: Segment, sign: Literal[1, -1]) -> None:
        if segment.sample is None:
            self.num_context_tokens += sign * len(segment.token_ids)
        else:
            self.num_sampled_tokens += sign * len(segment.token_ids)

    def _next_id(self) -> str:
        self.num_ids += 1
        return f"{self.prefix}.{self.num_ids - 1}"
