"""Assignment of responses to micro-batches, and the resulting model inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import ceil

import torch
from torch import Tensor

from coppice.train.groups import TrainingGroup
from coppice.train.packed_row import PackedRow
from coppice.train.spans import Spans
from coppice.train.tree import subtrees_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """One row of model input, with targets and the positions in the row that predict them.

    target_positions is on the CPU.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    target_positions: Tensor
    spans: Spans

    @property
    def logits_to_keep(self) -> int | Tensor:
        """Argument for the model: a count selects by slicing, a tensor by copying."""
        count = len(self.target_positions)
        last = torch.arange(count) + self.input_ids.shape[1] - count
        return max(count, 1) if torch.equal(self.target_positions, last) else self.target_positions


def plan_passes(lengths: Sequence[int], pass_tokens: int) -> list[tuple[int, ...]]:
    """Rows per micro-batch: at most pass_tokens tokens each, balanced, in order.

    A longer row gets its own micro-batch. Rows without tokens are left out.
    """
    if pass_tokens < 1:
        raise ValueError("a pass has at least one token")
    num_passes = ceil(sum(lengths) / pass_tokens)
    enough = sum(lengths) / max(num_passes, 1)
    passes: list[tuple[int, ...]] = []
    rows: list[int] = []
    tokens = 0
    for row, length in enumerate(lengths):
        if not length:
            continue
        if rows and (tokens >= enough or tokens + length > pass_tokens):
            passes.append(tuple(rows))
            rows, tokens = [], 0
        rows.append(row)
        tokens += length
    return [*passes, tuple(rows)] if rows else passes


def plan_subtree_passes(group: TrainingGroup, pass_tokens: int) -> list[tuple[int, ...]]:
    """Rows per micro-batch, depth first. A subtree below the prompt is never split."""
    subtrees = subtrees_of(group)
    tokens = [sum(group.lengths[row] for row in subtree) for subtree in subtrees]
    planned = plan_passes(tokens, pass_tokens)
    return [tuple(chain.from_iterable(subtrees[i] for i in chosen)) for chosen in planned]


def prompt_inputs(group: TrainingGroup, device: torch.device) -> Inputs:
    prompt = group.prompt[:-1]
    return Inputs(
        input_ids=prompt.to(device).unsqueeze(0),
        position_ids=torch.arange(len(prompt), device=device).unsqueeze(0),
        targets=torch.zeros(0, dtype=torch.int64, device=device),
        target_positions=torch.zeros(0, dtype=torch.int64),
        spans=Spans(lengths=(len(prompt),)),
    )


def response_inputs(group: TrainingGroup, rows: Sequence[int], device: torch.device) -> Inputs:
    """Inputs of whole subtrees, each in depth-first order."""
    packed = PackedRow(group, rows)
    return Inputs(
        input_ids=torch.cat(packed.input_tokens).to(device).unsqueeze(0),
        position_ids=torch.cat(packed.positions).to(device).unsqueeze(0),
        targets=torch.cat([group.responses[row] for row in rows]).to(device),
        target_positions=torch.cat(packed.target_positions),
        spans=packed.spans(),
    )


def concatenate_inputs(parts: Sequence[Inputs]) -> Inputs:
    """Concatenates the inputs into one row."""
    starts = [0, *accumulate(part.spans.num_tokens for part in parts)]
    return Inputs(
        input_ids=torch.cat([part.input_ids for part in parts], 1),
        position_ids=torch.cat([part.position_ids for part in parts], 1),
        targets=torch.cat([part.targets for part in parts]),
        target_positions=torch.cat(
            [p.target_positions + start for p, start in zip(parts, starts, strict=False)]
        ),
        spans=Spans(lengths=tuple(part.spans.num_tokens for part in parts)),
    )
