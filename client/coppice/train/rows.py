"""Logprobs of some of a group's responses, concatenated, as the input of a loss function.

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
    """Concatenated logprobs of some responses of a group.

    `logprobs` is [T] in float32 or wider, `rows` are the indices of the responses in their group.
    """

    logprobs: Tensor
    rows: tuple[int, ...]
    lengths: tuple[int, ...]

    def split(self) -> tuple[Tensor, ...]:
        """One tensor per response."""
        return torch.split(self.logprobs, list(self.lengths))

    def pick(self, group_tokens: Sequence[Tensor]) -> Tensor:
        """Selects these responses' per-token values from those of the whole group; returns [T]."""
        picked_T = torch.cat([group_tokens[row] for row in self.rows])
        if picked_T.shape != self.logprobs.shape:
            raise ValueError("there are not as many numbers as tokens in the responses")
        return picked_T.to(self.logprobs)

    def spread(self, group_rows: Tensor) -> Tensor:
        """Expands one value per response of the whole group to these tokens; returns [T]."""
        rows = torch.tensor(self.rows, device=group_rows.device)
        lengths = torch.tensor(self.lengths, device=group_rows.device)
        return group_rows[rows].repeat_interleave(lengths).to(self.logprobs)


LossFunction: TypeAlias = Callable[[RowLogprobs], Tensor]
"""A sum over tokens or rows, so that the losses of micro-batches add up to the group's loss."""


def token_logprobs(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> Tensor:
    """Returns [T]: logprobs under the temperature-scaled distribution."""
    wide = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
    scaled_TV = logits_TV.to(wide)
    if temperature != 1.0:
        scaled_TV = scaled_TV / temperature
    return -F.cross_entropy(scaled_TV, targets_T.to(logits_TV.device), reduction="none")
