"""Element order of a packed CPU cache block, measured with vLLM's own cache-write operation."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from vllm import _custom_ops

from engine.kv_transfer.cache_spec import CacheLayout
from kernels.kv_layout import PackOrder, index_digits, infer_order

NUM_HEADS: Final = 2  # enough to verify that heads are packed alike


def packed_order(
    caches: Sequence[torch.Tensor], layout: CacheLayout, attention_layers: Mapping[str, Any]
) -> PackOrder:
    """The order for a model whose attention kernels vLLM has chosen."""
    isa = attention_layers[layout.layers[0]].isa
    return derive_order(caches[0].shape[2], layout.head_dim, layout.dtype, isa)


def derive_order(block: int, head_dim: int, dtype: torch.dtype, isa: str) -> PackOrder:
    """The order for this instruction set. Raises UnknownPacking if packing is not a permutation.

    Keys and values are distinguished by writing one of them at a time.
    """
    digits = index_digits(block * head_dim, dtype)
    zeros = torch.zeros(block, NUM_HEADS, head_dim, dtype=dtype, device="cpu")
    written = []
    for digit in digits:
        vectors = digit.view(block, 1, head_dim).expand(-1, NUM_HEADS, -1).contiguous()
        keys = write_block(vectors, zeros, isa)
        values = write_block(zeros, vectors, isa)
        written.append((keys[:, : keys.shape[1] // 2], values[:, values.shape[1] // 2 :]))
    return PackOrder(
        keys=infer_order([keys for keys, _ in written]),
        values=infer_order([values for _, values in written]),
    )


def write_block(keys: torch.Tensor, values: torch.Tensor, isa: str) -> torch.Tensor:
    """One block [N, H, D] as packed by vLLM: [H, 2 * N * D]."""
    block, heads, head_dim = keys.shape
    cache = torch.zeros(1, heads, 2 * block, head_dim, dtype=keys.dtype, device="cpu")
    halves: Any = cache.chunk(2, dim=2)
    _custom_ops.cpu_attn_reshape_and_cache(
        keys,
        values,
        *halves,
        torch.arange(block),
        isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )
    return cache.view(heads, -1)
