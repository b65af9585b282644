"""How exported bytes become blocks: at once on a CPU, on the stream of the model on a GPU.

`place` reads the piece before it returns, so its slot may be given to others then, and whatever
runs afterwards, or on the current stream, finds the blocks filled.

[L, 2, H, T, D] of a piece: L layers, H heads, T tokens, D head_dim.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from kernels.kv_layout.pack import pack, scatter
from kernels.kv_layout.packed_order import PackOrder
from kernels.rope_shift.cpu import shift_keys
from kernels.rope_shift.rope_params import RotaryParams


class BlockWriter(Protocol):
    def place(self, piece: torch.Tensor, shift: int, block_ids: Sequence[int]) -> None:
        """From the first token of the first block on, keys moved by so many positions."""


class PackedBlockWriter:
    """Into the packed cache of vLLM's CPU backend, on the calling thread."""

    def __init__(
        self, caches: Sequence[torch.Tensor], order: PackOrder, rotary: RotaryParams | None
    ) -> None:
        self._caches, self._order, self._rotary = caches, order, rotary

    def place(self, piece: torch.Tensor, shift: int, block_ids: Sequence[int]) -> None:
        values = piece
        if shift:
            assert self._rotary is not None, "nothing is moved that cannot be"
            values = torch.empty(piece.shape, dtype=piece.dtype)
            values[:, 0] = shift_keys(piece[:, 0], shift, self._rotary)
            values[:, 1] = piece[:, 1]
        pack(values, self._caches, block_ids, self._order)


class CudaBlockWriter:
    """Into a GPU's cache. Never run yet: written for a machine that has one.

    The piece is read into pinned memory at once; the copy to the device, the turn and the scatter
    go onto the stream that the model computes on, in its order.
    """

    def __init__(self, caches: Sequence[torch.Tensor], rotary: RotaryParams | None) -> None:
        self._caches, self._rotary = caches, rotary

    def place(self, piece: torch.Tensor, shift: int, block_ids: Sequence[int]) -> None:
        from kernels.rope_shift.cuda import shift_keys_

        device = self._caches[0].device
        values = piece.contiguous().pin_memory().to(device, non_blocking=True)
        if shift:
            assert self._rotary is not None, "nothing is moved that cannot be"
            keys = values[:, 0].contiguous()
            shift_keys_(keys, shift, self._rotary)
            values[:, 0] = keys
        ids = torch.tensor(block_ids, pin_memory=True).to(device, non_blocking=True)
        scatter(values, self._caches, ids)
