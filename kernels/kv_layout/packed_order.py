"""Element order of packed cache blocks, inferred from blocks that the engine has written.

vLLM's CPU attention kernels pack a head's keys and values of a block in an order that depends on
the instruction set. The order is not hard-coded here: the engine writes blocks whose values are the
digits of their own index, and reading the blocks back gives the permutation.

N tokens per block, D head_dim, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

BASE: Final = 128  # integers below 128 are exact in every cache dtype


class UnknownPacking(Exception):
    """The values read back are not a permutation of those written, or heads differ."""


@dataclass(frozen=True, slots=True)
class PackOrder:
    """Permutation of a head's keys and of its values in a block.

    Element i of the flattened [N, D] is stored at keys[i], or values[i], of its half of the block.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def stacked(self) -> torch.Tensor:
        """Offsets [2, N * D] in a head's whole block, in which the values follow the keys."""
        return torch.stack([self.keys, self.values + len(self.keys)])


def index_digits(num_values: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Digits of 0 .. num_values - 1 in base 128, the lowest digit first, on the CPU."""
    index, digits = torch.arange(num_values), []
    while True:
        digits.append((index % BASE).to(dtype))
        index = index // BASE
        if not index.any():
            return digits


def infer_order(written: Sequence[torch.Tensor]) -> torch.Tensor:
    """Permutation of a head's values, from one probe per digit of the index.

    `written[i]` [H, N * D] was read back after digit i of the index was written for every head.
    """
    index = sum(digit.to(torch.int64) * BASE**i for i, digit in enumerate(written))
    assert isinstance(index, torch.Tensor), "at least one digit was written"
    if not (index == index[0]).all():
        raise UnknownPacking("heads are packed differently")
    if not torch.equal(index[0].sort().values, torch.arange(index.shape[1])):
        raise UnknownPacking("some values are lost or repeated")
    return index[0].argsort()
