"""FlashAttention's varlen interface over a paged KV cache, computed in float32 with PyTorch."""

from typing import Any

import torch
from torch import Tensor

from tests.kernels.attention_reference import attention_over


def flash_attn_varlen_func(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    **unused: Any,
) -> Any:
    """Attention of each sequence's queries over its cached keys; lse[Hq, tokens] is to base e."""
    out = torch.empty_like(q) if out is None else out
    lses = torch.full((q.shape[1], len(q)), torch.inf)
    starts, lens = cu_seqlens_q.tolist(), seqused_k.tolist()
    assert len(lens) == len(starts) - 1 == len(block_table) and starts[-1] <= len(q)
    assert max(lens) <= max_seqlen_k <= block_table.shape[1] * k.shape[1] + k.shape[1] - 1
    for i, length in enumerate(lens):
        tokens = slice(starts[i], starts[i + 1])
        assert tokens.stop - tokens.start <= max_seqlen_q
        positions = torch.arange(length)
        at = block_table[i].long()[positions // k.shape[1]], positions % k.shape[1]
        result, lse = attention_over(
            q[tokens].float(), k[at].float(), v[at].float(), softmax_scale, causal=causal
        )
        out[tokens], lses[:, tokens] = result.to(out.dtype), lse.T
    return (out, lses) if return_softmax_lse else out
