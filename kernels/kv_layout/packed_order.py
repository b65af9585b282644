"""The order in which a packed cache block keeps its values, learnt from blocks that were written.

A CPU's attention kernel wants a head's keys and values of one block in an order of its own, which
changes with the instruction set. Nothing is known here about any of them: the engine writes blocks
whose values are the digits of their own index, and what comes back says where each one went.

N tokens a block, D head_dim, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

BASE: Final = 128  # every whole number below is exact in every type that a cache has


class UnknownPacking(Exception):
    """What came back is not what went in, in another order."""


@dataclass(frozen=True, slots=True)
class PackOrder:
    """Place i of [N, D], flattened, lies at keys[i], or values[i], of a head's half of a block."""

    keys: torch.Tensor
    values: torch.Tensor

    def stacked(self) -> torch.Tensor:
        """[2, N * D]: places in a head's whole block, where the values follow the keys."""
        return torch.stack([self.keys, self.values + len(self.keys)])


def index_digits(num_values: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """0 .. num_places - 1 in base 128, the lowest digit first, on the CPU."""
    index, digits = torch.arange(num_values), []
    while True:
        digits.append((index % BASE).to(dtype))
        index = index // BASE
        if not index.any():
            return digits


def infer_order(written: Sequence[torch.Tensor]) -> torch.Tensor:
    """`written[i]` is what [H, N * D] became when every head's values were digit i of the index."""
    index = sum(digit.to(torch.int64) * BASE**i for i, digit in enumerate(written))
    assert isinstance(index, torch.Tensor), "at least one digit was written"
    if not (index == index[0]).all():
        raise UnknownPacking("heads are packed differently")
    if not torch.equal(index[0].sort().values, torch.arange(index.shape[1])):
        raise UnknownPacking("some values are lost or repeated")
    return index[0].argsort()
