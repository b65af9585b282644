"""The logprobs of some of a group's responses, one after the other, as a loss takes them.

Shapes: T tokens of these responses without padding, G responses of the whole group, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLogprobs:
    """logprobs is [T], in float32 or wider; rows are the responses' places in their group."""

    logprobs: Tensor
    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    def split(self) -> tuple[Tensor, ...]:
        """One tensor for each response."""
        return torch.split(self.logprobs, list(self.lengths))

    def pick(self, group_tokens: Sequence[Tensor]) -> Tensor:
        """[T]: of numbers given for every token of the whole group, those of these responses."""
        picked_T = torch.cat([group_tokens[row] for row in self.rows])
        if picked_T.shape != self.logprobs.shape:
            raise ValueError("there are not as many numbers as tokens in the responses")
        return picked_T.to(self.logprobs)

    def spread(self, group_rows: Tensor) -> Tensor:
        """[T]: of one number for each response of the whole group, that of each token's."""
        rows = torch.tensor(self.rows, device=group_rows.device)
        lengths = torch.tensor(self.lengths, device=group_rows.device)
        return group_rows[rows].repeat_interleave(lengths).to(self.logprobs)


LossFunction: TypeAlias = Callable[[RowLogprobs], Tensor]
"""A sum over tokens or rows, so that the passes' losses add up to the loss of the group."""


def token_logprobs(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> Tensor:
    """[T], of the distribution that the temperature makes."""
    wide = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
    scaled_TV = logits_TV.to(wide)
    if temperature != 1.0:
        scaled_TV = scaled_TV / temperature
    return -F.cross_entropy(scaled_TV, targets_T.to(logits_TV.device), reduction="none")
