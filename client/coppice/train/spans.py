"""Visibility of tokens in a packed row: which keys each query reads."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Tokens from start to stop, which are read by all tokens from stop to end."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Length of each part of a packed row, and the branches between parts.

    Each part attends causally to itself. The parts of a tree are in depth-first order, so the
    descendants of a part follow it directly.
    """

    lengths: tuple[int, ...]
    branches: tuple[Branch, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def ends(self) -> Tensor:
        """For each token, the end of the range of later tokens that read it."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        stops = torch.tensor(list(accumulate(self.lengths)), dtype=torch.int64)
        ends = stops.repeat_interleave(lengths)
        for branch in self.branches:
            ends[branch.start : branch.stop] = branch.end
        return ends
