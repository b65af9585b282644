"""Copy from cache blocks to the canonical KV layout, for all layers of a prompt.

B blocks of the cache, n of them the prompt's, L layers, H heads, N tokens per block, D head_dim,
T tokens of the prompt: (n - 1) * N < T <= n * N. The caches of all layers have the shape
[B, H, N, 2 * D]. `out` is [L, 2, H, T, D], keys before values. It can have any strides, so a tensor
parallel rank can write only its own heads.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from kernels.kv_layout.packed_order import PackOrder

MAX_INDICES: Final = 2**20
"""Values gathered per call; bounds the index tensor, which takes eight bytes per value."""


def unpack(
    caches: Sequence[torch.Tensor],
    block_ids: Sequence[int],
    order: PackOrder,
    out: torch.Tensor,
    *,
    max_indices: int = MAX_INDICES,
) -> None:
    """Copy from packed CPU blocks, contiguous, whose last two dimensions are in `order`."""
    check_shapes(caches, block_ids, out)
    flat = [cache.view(-1) for cache in caches]
    blocks_per_chunk = max(1, max_indices // caches[0][0].numel())
    for tokens, indices in iter_chunks(caches[0], block_ids, order, out.shape[3], blocks_per_chunk):
        for values, layer in zip(flat, out, strict=True):
            layer[:, :, tokens].copy_(values.index_select(0, indices.view(-1)).view(indices.shape))


def gather(caches: Sequence[torch.Tensor], block_ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copy from unpacked blocks, in which each token has its keys and then its values.

    The strides are arbitrary: heads or tokens may be the outer dimension, and a block may contain
    all layers. One gather and one copy per layer, on the current CUDA stream.
    """
    check_shapes(caches, block_ids, out)
    num_tokens = out.shape[3]
    for cache, layer in zip(caches, out, strict=True):
        blocks = cache.index_select(0, block_ids)  # [n, H, N, 2 * D]
        halves = blocks.view(*blocks.shape[:3], 2, -1).permute(3, 1, 0, 2, 4)  # [2, H, n, N, D]
        layer.copy_(halves.flatten(2, 3)[:, :, :num_tokens])


def check_shapes(
    caches: Sequence[torch.Tensor], block_ids: Sequence[int] | torch.Tensor, out: torch.Tensor
) -> None:
    num_blocks, heads, block, content = caches[0].shape
    layers, two, out_heads, num_tokens, head_dim = out.shape
    assert all(cache.shape == caches[0].shape for cache in caches), "layers differ in shape"
    assert (layers, two, out_heads) == (len(caches), 2, heads), f"out is {tuple(out.shape)}"
    assert content == 2 * head_dim, "keys and values of one size lie side by side"
    assert (len(block_ids) - 1) * block < num_tokens <= len(block_ids) * block, "blocks and tokens"


def iter_chunks(
    cache: torch.Tensor,
    block_ids: Sequence[int],
    order: PackOrder,
    num_tokens: int,
    blocks_per_chunk: int,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Ranges of tokens, with the offsets of their values in a layer's cache, [2, H, tokens, D]."""
    _, heads, block, content = cache.shape
    ids, block_offsets = torch.tensor(block_ids), order.stacked()[:, None, None]
    for first in range(0, len(block_ids), blocks_per_chunk):
        some = ids[first : first + blocks_per_chunk]
        starts = (some * heads + torch.arange(heads)[:, None]) * (block * content)  # [H, n]
        start, end = first * block, min((first + len(some)) * block, num_tokens)
        indices = (starts[None, :, :, None] + block_offsets).view(2, heads, -1, content // 2)
        yield slice(start, end), indices[:, :, : end - start].contiguous()
