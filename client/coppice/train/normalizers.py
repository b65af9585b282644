"""Loss normalizers: computed over the whole step and fixed before its first micro-batch.

The weight of every token is known before any forward, so the gradient does not depend on how the
tokens are distributed over micro-batches, groups and ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from coppice.train.groups import TrainingGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Number of responses and response tokens of a step."""

    num_responses: int
    num_tokens: int

    @classmethod
    def of(cls, groups: Iterable[TrainingGroup]) -> "Totals":
        lengths = [length for group in groups for length in group.lengths]
        return cls(num_responses=len(lengths), num_tokens=sum(lengths))

    def over_ranks(self, process_group: dist.ProcessGroup | None = None) -> "Totals":
        """Sums over all ranks. A collective operation: every rank must call it."""
        both = torch.tensor([self.num_responses, self.num_tokens])
        if dist.get_backend(process_group) == "nccl":
            both = both.cuda()
        dist.all_reduce(both, group=process_group)
        num_responses, num_tokens = both.tolist()
        return Totals(num_responses=num_responses, num_tokens=num_tokens)


TokenWeights: TypeAlias = Callable[[Tensor], Tensor]
"""Maps response lengths to the weight of each token of these responses in the loss."""


def token_mean(totals: Totals) -> TokenWeights:
    """Equal weight per token."""
    return lambda lengths: torch.full(lengths.shape, 1 / totals.num_tokens, dtype=torch.float64)


def sequence_mean(totals: Totals) -> TokenWeights:
    """Equal weight per response, whatever its length: GRPO as originally published."""
    return lambda lengths: 1 / (totals.num_responses * lengths.double())


def dr_grpo(totals: Totals, *, max_tokens: int) -> TokenWeights:
    """Dr. GRPO: constant weight per token; max_tokens is the length limit of a response."""
    weight = 1 / (totals.num_responses * max_tokens)
    return lambda lengths: torch.full(lengths.shape, weight, dtype=torch.float64)
