"""How responses are packed into rows without padding, and what a model is asked to compute.

The last prompt token belongs to the responses: it predicts the first token of each. So the shared
prompt is its first P-1 tokens, and every response is fed as the last prompt token and all its own
tokens but the last, from position P-1 on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from coppice.train.groups import TrainingGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """One row of a model's input, and the targets, the tokens that its last positions predict."""

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor


def plan_passes(lengths: Sequence[int], pass_tokens: int) -> list[tuple[int, ...]]:
    """Rows of each pass: at most that many tokens, about equally many, a longer row alone.

    Rows without a token are in none.
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


def prompt_inputs(group: TrainingGroup, device: torch.device) -> Inputs:
    prompt = group.prompt[:-1]
    return _inputs([prompt], [torch.arange(len(prompt))], [prompt[:0]], device)


def response_inputs(group: TrainingGroup, rows: Sequence[int], device: torch.device) -> Inputs:
    responses = [group.responses[row] for row in rows]
    return _inputs(
        [_fed(group, response) for response in responses],
        [_positions(group, response) for response in responses],
        responses,
        device,
    )


def _fed(group: TrainingGroup, response: Tensor) -> Tensor:
    return torch.cat([group.prompt[-1:], response])[:-1]


def _positions(group: TrainingGroup, response: Tensor) -> Tensor:
    return torch.arange(len(response)) + len(group.prompt) - 1


def joined(parts: Sequence[Inputs]) -> Inputs:
    """All of them in one row."""
    return Inputs(
        input_ids=torch.cat([part.input_ids for part in parts], 1),
        position_ids=torch.cat([part.position_ids for part in parts], 1),
        targets=torch.cat([part.targets for part in parts]),
    )


def _inputs(
    fed: Sequence[Tensor],
    positions: Sequence[Tensor],
    targets: Sequence[Tensor],
    device: torch.device,
) -> Inputs:
    return Inputs(
        input_ids=torch.cat(list(fed)).to(device).unsqueeze(0),
        position_ids=torch.cat(list(positions)).to(device).unsqueeze(0),
        targets=torch.cat(list(targets)).to(device),
    )
