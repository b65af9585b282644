"""What a loss is divided by: of the whole step, and fixed before its first pass.

So every token has its weight before any is computed, and the gradient is the same whatever passes,
groups and ranks the tokens are spread over.
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
    """Responses and response tokens of a step."""

    num_responses: int
    num_tokens: int

    @classmethod
    def of(cls, groups: Iterable[TrainingGroup]) -> "Totals":
        lengths = [length for group in groups for length in group.lengths]
        return cls(num_responses=len(lengths), num_tokens=sum(lengths))

    def over_ranks(self, process_group: dist.ProcessGroup | None = None) -> "Totals":
        """The sums over all ranks, each of which must ask."""
        both = torch.tensor([self.num_responses, self.num_tokens])
        if dist.get_backend(process_group) == "nccl":
            both = both.cuda()
        dist.all_reduce(both, group=process_group)
        num_responses, num_tokens = both.tolist()
        return Totals(num_responses=num_responses, num_tokens=num_tokens)


TokenWeights: TypeAlias = Callable[[Tensor], Tensor]
"""Of the lengths of responses, the weight that each token of them has in the loss."""


def token_mean(totals: Totals) -> TokenWeights:
    """Every token weighs the same."""
    return lambda lengths: torch.full(lengths.shape, 1 / totals.num_tokens, dtype=torch.float64)


def sequence_mean(totals: Totals) -> TokenWeights:
    """Every response weighs the same, however long it is: GRPO as first published."""
    return lambda lengths: 1 / (totals.num_responses * lengths.double())


def dr_grpo(totals: Totals, *, max_tokens: int) -> TokenWeights:
    """Dr. GRPO: a token's weight depends on no length. A response may have max_tokens."""
    weight = 1 / (totals.num_responses * max_tokens)
    return lambda lengths: torch.full(lengths.shape, weight, dtype=torch.float64)
