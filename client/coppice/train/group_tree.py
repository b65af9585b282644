"""Tree structure of a training group: parents, subtrees, and runs of tokens of one request."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coppice.train.training_group import TrainingGroup, TrainingTree, request_starts_of


def parents_of(group: TrainingGroup) -> tuple[int | None, ...]:
    """Index of each response's parent in a tree; None for responses that start at the prompt."""
    if isinstance(group, TrainingTree):
        return group.parents
    return (None,) * len(group.responses)


def subtrees_of(group: TrainingGroup) -> list[tuple[int, ...]]:
    """Subtrees that start at the prompt, each as depth-first indices of its responses."""
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


# Tensor's == is elementwise, so the dataclass compares by identity.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledRun:
    """Adjacent targets of one request, the request's earlier targets, and its prompt."""

    tokens: Tensor
    earlier: Tensor
    prompt: Tensor


def sampled_runs(group: TrainingGroup, row: int) -> Iterator[SampledRun]:
    """Runs of adjacent targets of a response, in order."""
    path = group.path(row) if isinstance(group, TrainingTree) else (row,)
    tokens = torch.cat([group.prompt, *(group.responses[at] for at in path)])
    masks = [_loss_mask(group, at) for at in path]
    is_target = torch.cat([torch.zeros(len(group.prompt), dtype=torch.bool), *masks])
    own = len(tokens) - len(group.responses[row])
    edges = (is_target[1:] != is_target[:-1]).nonzero().flatten() + 1
    found = (
        group.path_starts(row) if isinstance(group, TrainingTree) else request_starts_of(group, row)
    )
    starts = [len(group.prompt) + start for start in found]
    borders = sorted({0, *edges.tolist(), *starts, len(tokens)})
    for start, stop in zip(borders, borders[1:], strict=False):
        if is_target[start] and stop > own:
            first = max(start, own)
            yield SampledRun(
                tokens=tokens[first:stop], earlier=tokens[start:first], prompt=tokens[:start]
            )


def _loss_mask(group: TrainingGroup, row: int) -> Tensor:
    if group.loss_masks is None:
        return torch.ones(len(group.responses[row]), dtype=torch.bool)
    return group.loss_masks[row]


def max_row_tokens(group: TrainingGroup) -> int:
    """Length in tokens of the prompt plus its longest response, or its longest tree path."""
    ends: list[int] = []
    for length, parent in zip(group.lengths, parents_of(group), strict=True):
        ends.append(length + (0 if parent is None else ends[parent]))
    return len(group.prompt) + max(ends)
