"""Attention with sliding windows on CPU, and attention sinks with their gradient.

A windowed layer is computed in chunks of adjacent queries. All keys that a chunk reads are adjacent
positions on one path: the end of the prompt, the segments above in a tree, and the row itself. One
flash attention call computes chunks of equal shape under one mask.

A sink is a logit of each head that takes part in the softmax and has no value. It is added once,
to the merged output and log-sum-exp. The backward kernels receive the result of this, so their
gradients stay exact.

Shapes: T packed tokens, P prompt tokens, S = P + T, N chunks of Q queries and R keys, H query
heads, K KV heads, D head size.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coppice.train.packed_row import Spans

CHUNK = 256
MAX_CALL_KEYS = 2**14
"""Keys that are gathered for one flash attention call, unless one chunk needs more."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerAttention:
    """Softmax attention of one layer.

    A query reads the last `window` tokens, itself included, or all tokens if it is None. sinks_H
    are logits per head.
    """

    scale: float
    window: int | None = None
    sinks_H: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.sinks_H is None


def add_sinks(o_1HTD: Tensor, lse_1HT: Tensor, sinks_H: Tensor | None) -> None:
    """Adds sinks to an attention output and its log-sum-exp, in place."""
    if sinks_H is None:
        return
    total_1HT = torch.logaddexp(lse_1HT, sinks_H.to(lse_1HT.dtype)[:, None])
    o_1HTD.mul_((lse_1HT - total_1HT).exp().unsqueeze(-1))
    lse_1HT.copy_(total_1HT)


def sinks_gradient(
    do_1HTD: Tensor, o_1HTD: Tensor, lse_1HT: Tensor, sinks_H: Tensor | None
) -> Tensor | None:
    """Gradient of the sinks, given the output and the log-sum-exp that include them."""
    if sinks_H is None:
        return None
    weight_1HT = (sinks_H.to(lse_1HT.dtype)[:, None] - lse_1HT).exp()
    products_1HT = (do_1HTD.to(lse_1HT.dtype) * o_1HTD.to(lse_1HT.dtype)).sum(-1)
    return -(weight_1HT * products_1HT).sum((0, 2)).to(sinks_H.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowCall:
    """Chunks of equal shape that one flash attention call computes.

    The indices refer to packed tokens, and to the prompt followed by the packed tokens.
    """

    query_index_NQ: Tensor
    key_index_NR: Tensor
    mask_QR: Tensor

    def queries(self, packed_1HTD: Tensor) -> Tensor:
        """Copy [N, H, Q, D] of the queries of a packed tensor, which may lack D."""
        return _gather(packed_1HTD, self.query_index_NQ)

    def keys(self, joined_1KSD: Tensor) -> Tensor:
        return _gather(joined_1KSD, self.key_index_NR)


def _gather(packed: Tensor, index: Tensor) -> Tensor:
    _, heads, _, *rest = packed.shape
    return (
        packed[0].index_select(1, index.flatten()).view(heads, *index.shape, *rest).transpose(0, 1)
    )


def _add(packed: Tensor, index: Tensor, chunks: Tensor) -> None:
    """Adds chunks [N, H, Q, D] to the tokens of a packed tensor, in place."""
    packed[0].index_add_(1, index.flatten(), chunks.transpose(0, 1).flatten(1, 2))


def window_calls(prompt_tokens: int, spans: Spans, window: int) -> Iterator[WindowCall]:
    """Calls that compute windowed attention, such that each query is in one of them."""
    shapes: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for queries, keys in _chunks(prompt_tokens, spans, window):
        shapes[len(queries), len(keys)].append((queries, keys))
    for (num_queries, num_keys), chunks in shapes.items():
        mask = window_mask(num_queries, num_keys, window)
        step = max(1, MAX_CALL_KEYS // num_keys)
        for first in range(0, len(chunks), step):
            queries_N, keys_N = zip(*chunks[first : first + step], strict=True)
            yield WindowCall(
                query_index_NQ=torch.stack(queries_N),
                key_index_NR=torch.stack(keys_N),
                mask_QR=mask,
            )


def _chunks(prompt_tokens: int, spans: Spans, window: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the indices of a chunk's queries, and of the keys from its first window on."""
    prompt = torch.arange(prompt_tokens)
    starts = [0, *accumulate(spans.lengths)]
    for start, length in zip(starts, spans.lengths, strict=False):
        above = [
            torch.arange(branch.start, branch.stop) + prompt_tokens
            for branch in spans.branches
            if branch.stop <= start < branch.end
        ]
        before = torch.cat([prompt, *above]) if length else prompt
        path = torch.cat([before, torch.arange(start, start + length) + prompt_tokens])
        for first in range(0, length, CHUNK):
            last = min(first + CHUNK, length)
            keys = path[max(0, len(before) + first - window + 1) : len(before) + last]
            yield torch.arange(start + first, start + last), keys


def window_mask(num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """Visible keys [Q, R] of adjacent queries, which end at the position of the last key."""
    visible_QR = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    if window is None:
        return visible_QR
    return visible_QR.triu(num_keys - num_queries - window + 1)


Prompt: TypeAlias = tuple[Tensor, Tensor]


def window_attention(
    q_1HTD: Tensor,
    prompt: Prompt,
    k_1KTD: Tensor,
    v_1KTD: Tensor,
    spans: Spans,
    layer: LayerAttention,
) -> Tensor:
    """Attention output o_1HTD of packed rows in a layer with a window, on CPU."""
    assert layer.window is not None, "the layer has a window"
    # Earlier tokens of the prompt are outside of all windows.
    first = max(0, prompt[0].shape[2] - layer.window + 1)
    prompt_k, prompt_v = (part[:, :, first:] for part in prompt)
    output: Tensor = _WindowAttention.apply(  # type: ignore[no-untyped-call]
        q_1HTD, prompt_k, prompt_v, k_1KTD, v_1KTD, layer.sinks_H, spans, layer
    )
    return output


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_1HTD: Tensor,
        prompt_k_1KPD: Tensor,
        prompt_v_1KPD: Tensor,
        k_1KTD: Tensor,
        v_1KTD: Tensor,
        sinks_H: Tensor | None,
        spans: Spans,
        layer: LayerAttention,
    ) -> Tensor:
        q = to_float32(q_1HTD)
        joined_k = to_float32(torch.cat([prompt_k_1KPD, k_1KTD], 2))
        joined_v = to_float32(torch.cat([prompt_v_1KPD, v_1KTD], 2))
        o_1HTD, lse_1HT = torch.zeros_like(q), torch.zeros_like(q[..., 0])
        ctx.num_prompt, ctx.spans, ctx.layer = prompt_k_1KPD.shape[2], spans, layer
        for call in window_calls(ctx.num_prompt, spans, layer.window or 0):
            o, lse = _flash(
                call.queries(q),
                call.keys(joined_k),
                call.keys(joined_v),
                attn_mask=_additive(call.mask_QR, q.dtype),
                scale=layer.scale,
            )
            _add(o_1HTD, call.query_index_NQ, o)
            _add(lse_1HT, call.query_index_NQ, lse)
        add_sinks(o_1HTD, lse_1HT, sinks_H)
        o_1HTD = o_1HTD.to(q_1HTD.dtype)
        ctx.save_for_backward(
            q_1HTD, prompt_k_1KPD, prompt_v_1KPD, k_1KTD, v_1KTD, sinks_H, o_1HTD, lse_1HT
        )
        return o_1HTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_1HTD: Tensor) -> tuple[Tensor | None, ...]:
        q, prompt_k, prompt_v, k, v, sinks_H, o, lse_1HT = ctx.saved_tensors
        narrow = q.dtype
        do, q, o = (to_float32(packed) for packed in (do_1HTD, q, o))
        joined_k = to_float32(torch.cat([prompt_k, k], 2))
        joined_v = to_float32(torch.cat([prompt_v, v], 2))
        dq, dk, dv = (torch.zeros_like(packed) for packed in (q, joined_k, joined_v))
        for call in window_calls(ctx.num_prompt, ctx.spans, ctx.layer.window):
            grads = _flash_backward(
                call.queries(do),
                call.queries(q),
                call.keys(joined_k),
                call.keys(joined_v),
                call.queries(o),
                call.queries(lse_1HT),
                0.0,
                False,
                attn_mask=_additive(call.mask_QR, q.dtype),
                scale=ctx.layer.scale,
            )
            _add(dq, call.query_index_NQ, grads[0])
            _add(dk, call.key_index_NR, grads[1])
            _add(dv, call.key_index_NR, grads[2])
        dsinks_H = sinks_gradient(do, o, lse_1HT, sinks_H)
        P = ctx.num_prompt
        dk, dv = dk.to(narrow), dv.to(narrow)
        prompt_grads = dk[:, :, :P], dv[:, :, :P]
        return dq.to(narrow), *prompt_grads, dk[:, :, P:], dv[:, :, P:], dsinks_H, None, None


def _additive(visible_QR: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible_QR.shape, dtype=dtype).masked_fill_(~visible_QR, -torch.inf)


def to_float32(packed: Tensor) -> Tensor:
    """Converts to float32: for few tokens the kernels are up to 3x faster than in bfloat16."""
    return packed if packed.dtype == torch.float64 else packed.float()
