"""How exported bytes become blocks: at once on a CPU, on the stream of the model on a GPU.

`place` reads its pieces before it returns, so their slots may be given to others then, and whatever
runs afterwards, or on the current stream, finds the blocks filled.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from kernels.kv_pack.order import PackOrder
from kernels.kv_pack.pack import pack, scatter
from kernels.rotary_shift.cpu import shift_keys
from kernels.rotary_shift.rotary import Rotary

Moved = tuple[torch.Tensor, int]
"""[L, 2, H, T, D] of a run of tokens, and by how many positions its keys are to be moved."""


class Placer(Protocol):
    def place(self, pieces: Sequence[Moved], block_ids: Sequence[int]) -> None:
        """One after the other, from the first token of the first block on."""


class PackedPlacer:
    """Into the packed cache of vLLM's CPU backend, on the calling thread."""

    def __init__(
        self, caches: Sequence[torch.Tensor], order: PackOrder, rotary: Rotary | None
    ) -> None:
        self._caches, self._order, self._rotary = caches, order, rotary

    def place(self, pieces: Sequence[Moved], block_ids: Sequence[int]) -> None:
        values = joined(pieces)
        at = 0
        for piece, shift in pieces:
            end = at + piece.shape[3]
            if shift:
                assert self._rotary is not None, "nothing is moved that cannot be"
                keys = values[:, 0, :, at:end]
                keys.copy_(shift_keys(keys, shift, self._rotary))
            at = end
        pack(values, self._caches, block_ids, self._order)


class CudaPlacer:
    """Into a GPU's cache. Never run yet: written for a machine that has one.

    The pieces are read into pinned memory at once; the copy to the device, the turn and the scatter
    go onto the stream that the model computes on, in its order.
    """

    def __init__(self, caches: Sequence[torch.Tensor], rotary: Rotary | None) -> None:
        self._caches, self._rotary = caches, rotary

    def place(self, pieces: Sequence[Moved], block_ids: Sequence[int]) -> None:
        from kernels.rotary_shift.cuda import shift_keys_

        device = self._caches[0].device
        values = joined(pieces).pin_memory().to(device, non_blocking=True)
        at = 0
        for piece, shift in pieces:
            end = at + piece.shape[3]
            if shift:
                assert self._rotary is not None, "nothing is moved that cannot be"
                keys = values[:, 0, :, at:end].contiguous()
                shift_keys_(keys, shift, self._rotary)
                values[:, 0, :, at:end] = keys
            at = end
        ids = torch.tensor(block_ids, pin_memory=True).to(device, non_blocking=True)
        scatter(values, self._caches, ids)


def joined(pieces: Sequence[Moved]) -> torch.Tensor:
    """[L, 2, H, T, D] of all of them; a copy."""
    return torch.cat([piece for piece, _ in pieces], dim=3)
