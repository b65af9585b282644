"""Which tokens of a packed row read which others: all of it that attention needs to know."""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Tokens from start to stop, which all from stop to end follow on, and so read."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Tokens of each part, which read themselves causally, and the branches between parts.

    Parts of a tree lie depth first, so what follows on a part stands right behind it.
    """

    lengths: tuple[int, ...]
    branches: tuple[Branch, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def ends(self) -> Tensor:
        """Of each token, where those end that read it if they stand behind it."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        stops = torch.tensor(list(accumulate(self.lengths)), dtype=torch.int64)
        ends = stops.repeat_interleave(lengths)
        for branch in self.branches:
            ends[branch.start : branch.stop] = branch.end
        return ends
