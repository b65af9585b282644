"""Logprobs of response tokens from logits, under the sampling settings they were drawn with.

Shapes: T tokens of some responses without padding, V vocabulary.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from coppice.train.group_tree import sampled_runs
from coppice.train.logit_adjustments import NO_ADJUSTMENTS
from coppice.train.sampled_distribution import sampled_logprobs
from coppice.train.training_group import TrainingGroup


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
