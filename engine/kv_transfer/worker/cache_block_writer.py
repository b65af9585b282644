"""Writes of exported KV into cache blocks: synchronous on CPU, on the model's stream on GPU.

`place` reads the span before it returns, so its slot may be reused. Work that runs afterwards, or
later on the current stream, finds the blocks filled.

Shape of a span: [L, 2, H, T, D] with L layers, H heads, T tokens, D head_dim.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from kernels.kv_layout import PackOrder, pack, scatter
from kernels.rope_shift import RotaryParams, shift_keys


class BlockWriter(Protocol):
    def place(self, piece: torch.Tensor, shift: int, block_ids: Sequence[int]) -> None:
        """Write from the first token of the first block on, keys shifted by `shift` positions."""


class PackedBlockWriter:
    """Writer into the packed cache of vLLM's CPU backend, on the calling thread."""

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
    """Writer into a GPU's cache. Not tested yet on a machine with a GPU.

    The span is copied to pinned memory at once. The copy to the device, the key shift and the
    scatter are queued on the model's stream, in order.
    """

    def __init__(self, caches: Sequence[torch.Tensor], rotary: RotaryParams | None) -> None:
        self._caches, self._rotary = caches, rotary

    def place(self, piece: torch.Tensor, shift: int, block_ids: Sequence[int]) -> None:
        from kernels.rope_shift_cuda import shift_keys_

        device = self._caches[0].device
        values = piece.contiguous().pin_memory().to(device, non_blocking=True)
        if shift:
            assert self._rotary is not None, "nothing is moved that cannot be"
            keys = values[:, 0].contiguous()
            shift_keys_(keys, shift, self._rotary)
            values[:, 0] = keys
        ids = torch.tensor(block_ids, pin_memory=True).to(device, non_blocking=True)
        scatter(values, self._caches, ids)
