"""Copy from the canonical KV layout into cache blocks, the inverse of unpack.py.

Shapes are those of unpack.py. In the last block only the given tokens are written.
"""

from collections.abc import Sequence

import torch

from kernels.kv_layout.from_blocks import MAX_INDICES, check_shapes, iter_chunks
from kernels.kv_layout.packed_order import PackOrder


def pack(
    values: torch.Tensor,
    caches: Sequence[torch.Tensor],
    block_ids: Sequence[int],
    order: PackOrder,
    *,
    max_indices: int = MAX_INDICES,
) -> None:
    """Copy `values` [L, 2, H, T, D] into packed blocks, which are contiguous and on the CPU."""
    check_shapes(caches, block_ids, values)
    flat = [cache.view(-1) for cache in caches]
    blocks_per_chunk = max(1, max_indices // caches[0][0].numel())
    for tokens, indices in iter_chunks(
        caches[0], block_ids, order, values.shape[3], blocks_per_chunk
    ):
        for cache, layer in zip(flat, values, strict=True):
            cache.index_copy_(0, indices.view(-1), layer[:, :, tokens].reshape(-1))


def scatter(values: torch.Tensor, caches: Sequence[torch.Tensor], block_ids: torch.Tensor) -> None:
    """Copy into unpacked blocks with any strides, on the current CUDA stream."""
    check_shapes(caches, block_ids, values)
    block, num_tokens = caches[0].shape[2], values.shape[3]
    tokens = torch.arange(num_tokens, device=block_ids.device)
    blocks, within = block_ids[tokens // block], tokens % block
    for cache, layer in zip(caches, values, strict=True):
        cache[blocks, :, within] = layer.permute(2, 1, 0, 3).flatten(2)  # [T, H, 2 * D]
