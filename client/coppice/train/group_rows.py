"""Logprobs of response tokens from logits, and the tree structure of a group's responses.

Shapes: T tokens of some responses without padding, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from coppice.train.logit_adjustments import NO_ADJUSTMENTS
from coppice.train.sampled_distribution import sampled_logprobs
from coppice.train.training_group import TrainingGroup, TrainingTree, request_starts_of


def token_logprobs(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> Tensor:
    """Logprobs [T] of the target tokens under the temperature-scaled distribution."""
    wide = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
    scaled_TV = logits_TV.to(wide)
    if temperature != 1.0:
        scaled_TV = scaled_TV / temperature
    return -F.cross_entropy(scaled_TV, targets_T.to(logits_TV.device), reduction="none")


def response_token_logprobs(
    group: "TrainingGroup",
    rows: Sequence[int],
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature: float,
) -> Tensor:
    """Logprobs [T] of the tokens of some responses of a group, as they were sampled."""
    if group.support is None and group.adjustments == NO_ADJUSTMENTS:
        return token_logprobs(logits_TV, targets_T, temperature)
    lengths = group.target_lengths
    parts = torch.split(logits_TV, [lengths[row] for row in rows])
    return torch.cat(
        [
            _adjusted_logprobs(group, row, part_TV, temperature)
            for row, part_TV in zip(rows, parts, strict=True)
        ]
    )


def _adjusted_logprobs(
    group: "TrainingGroup", row: int, logits_TV: Tensor, temperature: float
) -> Tensor:
    """Logprobs [T] of a response's targets; each run of them is the response of one request."""
    found, support = [logits_TV.new_zeros(0)], group.support
    start = 0
    for run in sampled_runs(group, row):
        stop = start + len(run.tokens)
        found.append(
            sampled_logprobs(
                logits_TV[start:stop],
                run.tokens,
                temperature=temperature,
                support=None if support is None else support[row][start:stop],
                adjustments=group.adjustments,
                prompt=run.prompt,
                earlier=run.earlier,
            )
        )
        start = stop
    return torch.cat(found)


# Tensor's == is elementwise, so these dataclasses compare by identity.
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
