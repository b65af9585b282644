"""Copies between vLLM's CPU KV cache blocks and the contiguous [L, 2, H, T, D] layout.

B blocks of the cache, n of which hold the prompt, L layers, H heads, N tokens per block, D
head_dim, T tokens of the prompt: (n - 1) * N < T <= n * N. The caches of all layers have the shape
[B, H, N, 2 * D]. A prompt's KV is [L, 2, H, T, D], keys before values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

BASE: Final = 128  # integers below 128 are exact in every cache dtype


class UnknownPacking(Exception):
    """The order in which vLLM packs KV blocks is not a permutation, or differs between heads."""


@dataclass(frozen=True, slots=True)
class PackOrder:
    """Order in which vLLM's CPU attention stores an attention head's KV in a cache block.

    vLLM's CPU attention kernels pack a head's keys and values of a block in an order that depends
    on the instruction set. The order is not hard-coded here: the engine writes blocks whose values
    are the digits of their own index (`index_digits`), and reading the blocks back gives the
    permutation (`infer_order`).

    Element i of the flattened [N, D] is stored at keys[i], or values[i], of its half of the block.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def stacked(self) -> torch.Tensor:
        """Offsets [2, N * D] of keys and values in an attention head's part of a block.

        The values follow the keys.
        """
        return torch.stack([self.keys, self.values + len(self.keys)])


def index_digits(num_values: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Base-128 digits of the numbers 0 .. num_values - 1, one tensor per digit, lowest first."""
    index, digits = torch.arange(num_values), []
    while True:
        digits.append((index % BASE).to(dtype))
        index = index // BASE
        if not index.any():
            return digits


def infer_order(written: Sequence[torch.Tensor]) -> torch.Tensor:
    """Infer the storage order of an attention head's values from the digits of their indices.

    `written[i]` [H, N * D] was read back after digit i of the index was written for every head.
    """
    index = sum(digit.to(torch.int64) * BASE**i for i, digit in enumerate(written))
    assert isinstance(index, torch.Tensor), "at least one digit was written"
    if not (index == index[0]).all():
        raise UnknownPacking("heads are packed differently")
    if not torch.equal(index[0].sort().values, torch.arange(index.shape[1])):
        raise UnknownPacking("not a permutation")
    return index[0].argsort()


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
    """Copy a prompt's KV from packed CPU cache blocks to the canonical layout.

    The blocks are contiguous; their last two dimensions are in `order`. `out` can have any strides,
    so a tensor-parallel rank can write only its own heads.
    """
    check_shapes(caches, block_ids, out)
    flat = [cache.view(-1) for cache in caches]
    blocks_per_chunk = max(1, max_indices // caches[0][0].numel())
    for tokens, indices in iter_chunks(caches[0], block_ids, order, out.shape[3], blocks_per_chunk):
        for values, layer in zip(flat, out, strict=True):
            layer[:, :, tokens].copy_(values.index_select(0, indices.view(-1)).view(indices.shape))


def check_shapes(
    caches: Sequence[torch.Tensor], block_ids: Sequence[int] | torch.Tensor, out: torch.Tensor
) -> None:
    num_blocks, heads, block, content = caches[0].shape
    layers, two, out_heads, num_tokens, head_dim = out.shape
    assert all(cache.shape == caches[0].shape for cache in caches), "layers differ in shape"
    assert (layers, two, out_heads) == (len(caches), 2, heads), f"out is {tuple(out.shape)}"
    assert content == 2 * head_dim, "a block row must have keys and values of head_dim each"
    assert (len(block_ids) - 1) * block < num_tokens <= len(block_ids) * block, (
        "blocks do not fit tokens"
    )


def iter_chunks(
    cache: torch.Tensor,
    block_ids: Sequence[int],
    order: PackOrder,
    num_tokens: int,
    blocks_per_chunk: int,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield ranges of tokens, with the offsets of their KV in a layer's packed cache.

    The offsets are [2, H, tokens, D].
    """
    _, heads, block, content = cache.shape
    ids, block_offsets = torch.tensor(block_ids), order.stacked()[:, None, None]
    for first in range(0, len(block_ids), blocks_per_chunk):
        some = ids[first : first + blocks_per_chunk]
        starts = (some * heads + torch.arange(heads)[:, None]) * (block * content)  # [H, n]
        start, end = first * block, min((first + len(some)) * block, num_tokens)
        indices = (starts[None, :, :, None] + block_offsets).view(2, heads, -1, content // 2)
        yield slice(start, end), indices[:, :, : end - start].contiguous()


def pack(
    values: torch.Tensor,
    caches: Sequence[torch.Tensor],
    block_ids: Sequence[int],
    order: PackOrder,
    *,
    max_indices: int = MAX_INDICES,
) -> None:
    """Copy KV in the canonical layout, [L, 2, H, T, D], into packed CPU cache blocks.

    The blocks are contiguous. In the last block only the given tokens are written.
    """
    check_shapes(caches, block_ids, values)
    flat = [cache.view(-1) for cache in caches]
    blocks_per_chunk = max(1, max_indices // caches[0][0].numel())
    for tokens, indices in iter_chunks(
        caches[0], block_ids, order, values.shape[3], blocks_per_chunk
    ):
        for cache, layer in zip(flat, values, strict=True):
            cache.index_copy_(0, indices.view(-1), layer[:, :, tokens].reshape(-1))
