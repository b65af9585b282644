"""Rollout tree as tensors: a prompt and its segments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coppice.results import Group
from coppice.train.groups import TrainingGroup, prompt_of
from coppice.train.rows import RowLogprobs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingTree(TrainingGroup):
    """A group whose responses are the segments of a tree: each starts where its parent ends.

    `parents` holds the index of each segment's parent, which is less than its own, or None if the
    segment starts at the prompt. `leaves` holds the indices of the leaf segments.
    """

    parents: tuple[int | None, ...]
    leaves: tuple[int, ...]

    def __post_init__(self) -> None:
        TrainingGroup.__post_init__(self)
        if len(self.parents) != len(self.responses):
            raise ValueError("the parents are not as many as the segments")
        if not all(parent is None or 0 <= parent < at for at, parent in enumerate(self.parents)):
            raise ValueError("a segment's parent stands before it")
        if not all(0 <= leaf < len(self.responses) for leaf in self.leaves):
            raise ValueError("a leaf is the place of a segment")

    @classmethod
    def of(cls, prompt: Any, group: Group) -> "TrainingTree":
        """Builds it from the prompt's token ids and the tree of a rollout result, in its order."""
        if group.tree is None:
            raise ValueError("the group is no tree")
        segments = group.tree.segments
        places = {segment.id: place for place, segment in enumerate(segments)}
        return cls(
            prompt=prompt_of(prompt, group),
            responses=tuple(torch.from_numpy(segment.token_ids) for segment in segments),
            logprobs=tuple(torch.from_numpy(segment.logprobs) for segment in segments),
            parents=tuple(None if s.parent is None else places[s.parent] for s in segments),
            leaves=tuple(places[leaf] for leaf in group.tree.leaves),
        )

    def path(self, segment: int) -> tuple[int, ...]:
        """Indices from the prompt to the given segment, inclusive."""
        path = [segment]
        while (parent := self.parents[path[-1]]) is not None:
            path.append(parent)
        return tuple(path[::-1])

    def flattened(self) -> TrainingGroup:
        """One response per leaf, with the shared tokens repeated."""

        def rows(by_segment: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            paths = map(self.path, self.leaves)
            return tuple(torch.cat([by_segment[at] for at in path]) for path in paths)

        return TrainingGroup(
            prompt=self.prompt,
            responses=rows(self.responses),
            logprobs=None if self.logprobs is None else rows(self.logprobs),
        )

    def by_leaf(self, rows: RowLogprobs) -> RowLogprobs:
        """Joins the logprobs of a micro-batch's segments into rows of the flattened group."""
        by_segment = dict(zip(rows.rows, rows.split(), strict=True))
        paths = [self.path(leaf) for leaf in self.leaves]
        whole = [leaf for leaf, path in enumerate(paths) if by_segment.keys() >= set(path)]
        parts = [torch.cat([by_segment[at] for at in paths[leaf]]) for leaf in whole]
        return RowLogprobs(
            logprobs=torch.cat([rows.logprobs[:0], *parts]),
            rows=tuple(whole),
            lengths=tuple(len(part) for part in parts),
        )


def parents_of(group: TrainingGroup) -> tuple[int | None, ...]:
    """Parent of each response; None for all responses of a group that is not a tree."""
    if isinstance(group, TrainingTree):
        return group.parents
    return (None,) * len(group.responses)


def subtrees_of(group: TrainingGroup) -> list[tuple[int, ...]]:
    """For each response that starts at the prompt, its descendants and itself, depth first."""
    children: dict[int | None, list[int]] = {}
    for row, parent in enumerate(parents_of(group)):
        children.setdefault(parent, []).append(row)

    def below(row: int) -> tuple[int, ...]:
        subtree, open_rows = [], [row]
        while open_rows:
            subtree.append(open_rows.pop())
            open_rows += reversed(children.get(subtree[-1], []))
        return tuple(subtree)

    return [below(root) for root in children[None]]


def max_row_tokens(group: TrainingGroup) -> int:
    """Number of tokens of the longest row, prompt included."""
    ends: list[int] = []
    for length, parent in zip(group.lengths, parents_of(group), strict=True):
        ends.append(length + (0 if parent is None else ends[parent]))
    return len(group.prompt) + max(ends)
