"""Attention of packed responses over their shared prompt and themselves, on CPU flash kernels.

The results of several flash attention calls are merged by their log-sum-exps: one call of all
queries over the prompt, and one per tile of the rows and branches. The softmax gradient depends
only on the final output and log-sum-exp. Each call's backward kernel therefore receives the merged
ones, and the sum of the calls' gradients is exact.

Under a causal mask the CPU flash kernel processes whole tiles of 512 keys, so rows of up to 512
tokens cost twice the necessary work. Here rows are split into smaller causal tiles. Two adjacent
tiles are joined by one unmasked call, in which all queries of the second read all keys of the
first; then pairs of pairs are joined, and so on. The wasted work disappears.

Shapes: N repetitions of R tokens in a tile, T packed tokens of all rows, P prompt tokens, H query
heads, K KV heads, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from coppice.train.attention.reference import reference_attention
from coppice.train.attention.windows_and_sinks import (
    LayerAttention,
    add_sinks,
    sinks_gradient,
    to_float32,
    window_attention,
)
from coppice.train.packed_row import Spans

# Measured: with 64 the merges cost as much as the tiles save; with 256 half of each tile is wasted.
TILE = 128
# In longer rows the flash kernel wastes little of its tiles.
MAX_TILED_TOKENS = 2048
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Part of the attention over packed rows that one kernel call computes.

    It consists of `num` equal ranges of tokens, `step` apart.

    In each range the first num_keys tokens are keys, and the tokens from num_before on are queries.
    A tile with num_before = 0 attends to itself under a causal mask; other tiles have no mask.
    """

    start: int
    num: int
    step: int
    num_keys: int
    num_queries: int
    num_before: int = 0

    @property
    def is_causal(self) -> bool:
        return not self.num_before

    def keys(self, packed_1HTD: Tensor) -> Tensor:
        """View [N, H, tokens, D] of the tile's keys in a packed tensor, which may lack D."""
        return self._view(packed_1HTD, self.start, self.num_keys)

    def queries(self, packed_1HTD: Tensor) -> Tensor:
        return self._view(packed_1HTD, self.start + self.num_before, self.num_queries)

    def _view(self, packed: Tensor, first: int, num_tokens: int) -> Tensor:
        _, head, token, *rest = packed.stride()
        size = (self.num, packed.shape[1], num_tokens, *packed.shape[3:])
        strides = (self.step * token, head, token, *rest)
        return packed.as_strided(size, strides, packed.storage_offset() + first * token)


def split_into_tiles(spans: Spans, tile: int = TILE) -> Iterator[AttentionTile]:
    """Splits packed attention into tiles such that each visible query-key pair is in one tile."""
    for rows in _runs_of_equal_rows(spans.lengths):
        for start, num, step, tokens in _stretches(*rows, tile):
            yield AttentionTile(start, num, step, num_keys=tokens, num_queries=tokens)
        yield from _cross_tiles(*rows, tile)
    for branch in spans.branches:
        before, after = branch.stop - branch.start, branch.end - branch.stop
        if before and after:
            yield AttentionTile(branch.start, 1, 0, before, after, num_before=before)


def _cross_tiles(start: int, num_rows: int, row_tokens: int, half: int) -> Iterator[AttentionTile]:
    while half < row_tokens:
        for first, num, step, tokens in _stretches(start, num_rows, row_tokens, 2 * half):
            if tokens > half:
                yield AttentionTile(first, num, step, half, tokens - half, num_before=half)
        half *= 2


def _stretches(
    start: int, num_rows: int, row_tokens: int, size: int
) -> Iterator[tuple[int, int, int, int]]:
    """Splits equal rows into ranges of `size` tokens; yields (start, count, step, length).

    Each result stands for `count` ranges of `length` tokens, `step` apart. The remainders of the
    rows are shorter ranges.
    """
    whole, left = divmod(row_tokens, size)
    if whole and (num_rows == 1 or not left):
        yield start, num_rows * whole, size, size
    else:
        yield from ((start + i * size, num_rows, row_tokens, size) for i in range(whole))
    if left:
        yield start + whole * size, num_rows, row_tokens, left


def _runs_of_equal_rows(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (start, count, length) of each run of adjacent rows with equal length."""
    first = start = 0
    for row in range(1, len(lengths) + 1):
        if row == len(lengths) or lengths[row] != lengths[first]:
            if lengths[first]:
                yield start, row - first, lengths[first]
            start += (row - first) * lengths[first]
            first = row


def shared_prompt_attention(
    q_1HTD: Tensor,
    prompt: tuple[Tensor, Tensor],
    k_1KTD: Tensor,
    v_1KTD: Tensor,
    spans: Spans,
    layer: LayerAttention,
) -> Tensor:
    """Attention output o_1HTD of packed rows, which read a shared prompt and themselves.

    The prompt's keys and values are [1, K, P, D]. In a layer with a window they may lack all tokens
    before the first one that a row reads.
    """
    if not has_flash(q_1HTD, v_1KTD):
        return reference_attention(q_1HTD, prompt, k_1KTD, v_1KTD, spans, layer)
    if layer.window is not None:
        return window_attention(q_1HTD, prompt, k_1KTD, v_1KTD, spans, layer)
    output: Tensor = _SharedPrompt.apply(  # type: ignore[no-untyped-call]
        q_1HTD, *prompt, k_1KTD, v_1KTD, layer.sinks_H, spans, layer.scale
    )
    return output


def causal_attention(
    q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, layer: LayerAttention
) -> Tensor:
    """Causal attention output o_1HTD of one row, computed in tiles where that is faster."""
    num_tokens = q_1HTD.shape[2]
    is_tiled = num_tokens <= MAX_TILED_TOKENS and has_flash(q_1HTD, v_1KTD)
    if is_tiled or not layer.is_plain:
        nothing = k_1KTD[:, :, :0], v_1KTD[:, :, :0]
        spans = Spans(lengths=(num_tokens,))
        return shared_prompt_attention(q_1HTD, nothing, k_1KTD, v_1KTD, spans, layer)
    return F.scaled_dot_product_attention(
        q_1HTD, k_1KTD, v_1KTD, is_causal=True, scale=layer.scale, enable_gqa=True
    )


def has_flash(q_1HTD: Tensor, v_1KTD: Tensor) -> bool:
    """True if PyTorch's CPU flash attention kernels support these tensors."""
    return q_1HTD.device.type == "cpu" and q_1HTD.shape[-1] == v_1KTD.shape[-1]


class _SharedPrompt(torch.autograd.Function):
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
        scale: float,
    ) -> Tensor:
        o_1HTD, lse_1HT = _attend_prompt(q_1HTD, prompt_k_1KPD, prompt_v_1KPD, scale)
        o, q, k, v = (to_float32(packed) for packed in (o_1HTD, q_1HTD, k_1KTD, v_1KTD))
        for tile in split_into_tiles(spans):
            given = tile.queries(q), tile.keys(k), tile.keys(v)
            own = _flash(*given, 0.0, tile.is_causal, scale=scale)
            _merge(tile.queries(o), tile.queries(lse_1HT), *own)
        add_sinks(o, lse_1HT, sinks_H)
        o_1HTD = o.to(q_1HTD.dtype)
        ctx.save_for_backward(
            q_1HTD, prompt_k_1KPD, prompt_v_1KPD, k_1KTD, v_1KTD, sinks_H, o_1HTD, lse_1HT
        )
        ctx.spans, ctx.scale = spans, scale
        return o_1HTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_1HTD: Tensor) -> tuple[Tensor | None, ...]:
        q, prompt_k, prompt_v, k, v, sinks_H, o, lse = ctx.saved_tensors
        narrow = q.dtype
        dq, dprompt_k, dprompt_v = _prompt_backward(
            do_1HTD, q, prompt_k, prompt_v, o, lse, ctx.scale
        )
        dq, do, q, k, v, o = (to_float32(packed) for packed in (dq, do_1HTD, q, k, v, o))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        dsinks_H = sinks_gradient(do, o, lse, sinks_H)
        for tile in split_into_tiles(ctx.spans):
            given = tile.queries(do), tile.queries(q), tile.keys(k), tile.keys(v)
            merged = tile.queries(o), tile.queries(lse)
            grads = _flash_backward(*given, *merged, 0.0, tile.is_causal, scale=ctx.scale)
            tile.queries(dq).add_(grads[0])
            tile.keys(dk).add_(grads[1])
            tile.keys(dv).add_(grads[2])
        packed_grads = dk.to(narrow), dv.to(narrow)
        return dq.to(narrow), dprompt_k, dprompt_v, *packed_grads, dsinks_H, None, None


def _attend_prompt(
    q_1HTD: Tensor, k_1KPD: Tensor, v_1KPD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of all queries' attention to the prompt, strided for the backward."""
    if k_1KPD.shape[2]:
        o_1HTD, lse_1HT = _flash(q_1HTD, k_1KPD, v_1KPD, 0.0, False, scale=scale)
        return o_1HTD, lse_1HT
    _, H, T, D = q_1HTD.shape
    wide = torch.float64 if q_1HTD.dtype == torch.float64 else torch.float32
    lse_1TH = torch.full((1, T, H), -torch.inf, dtype=wide)
    return q_1HTD.new_zeros(1, T, H, D).transpose(1, 2), lse_1TH.transpose(1, 2)


def _prompt_backward(
    do: Tensor, q: Tensor, k_1KPD: Tensor, v_1KPD: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if not k_1KPD.shape[2]:
        return torch.zeros_like(q), torch.zeros_like(k_1KPD), torch.zeros_like(v_1KPD)
    dq, dk, dv = _flash_backward(do, q, k_1KPD, v_1KPD, o, lse, 0.0, False, scale=scale)
    return dq, dk, dv


def _merge(o_NHRD: Tensor, lse_NHR: Tensor, own_NHRD: Tensor, own_lse_NHR: Tensor) -> None:
    """Merges a tile's attention result (own_*) into accumulated o_NHRD and lse_NHR, in place."""
    o_NHRD.lerp_(own_NHRD, torch.sigmoid(own_lse_NHR - lse_NHR).unsqueeze(-1))
    lse_NHR.copy_(torch.logaddexp(lse_NHR, own_lse_NHR))
