"""Attention of packed responses to one shared prompt and causally to themselves.

Flash calls are merged by their log-sum-exps: one of all queries over the prompt, a causal one for
the rows, and for each branch of a tree one of all that follows on it. Softmax's gradient needs only
the final output and log-sum-exp, so handing the merged ones to each part's own backward kernel
gives the exact gradient of the whole.

Shapes: N rows of R tokens each, T packed tokens of all rows, P prompt tokens, H query heads,
K key and value heads, D head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coppice.train.reference import reference_attention
from coppice.train.spans import Branch, Spans

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def shared_prompt_attention(
    q_1HTD: Tensor,
    prompt: tuple[Tensor, Tensor],
    k_1KTD: Tensor,
    v_1KTD: Tensor,
    spans: Spans,
    scale: float,
) -> Tensor:
    """o_1HTD. The prompt's keys and values are [1, K, P, D]."""
    if q_1HTD.device.type != "cpu" or q_1HTD.shape[-1] != v_1KTD.shape[-1]:
        return reference_attention(q_1HTD, prompt, k_1KTD, v_1KTD, spans, scale)
    output: Tensor = _SharedPrompt.apply(  # type: ignore[no-untyped-call]
        q_1HTD, *prompt, k_1KTD, v_1KTD, spans, scale
    )
    return output


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring rows of one length, which one kernel call takes as a batch."""

    start: int
    num_rows: int
    row_tokens: int

    def of(self, packed_1HTD: Tensor) -> Tensor:
        """A view [N, H, R, D]; also of what has no last dimension."""
        stop = self.start + self.num_rows * self.row_tokens
        block = packed_1HTD[0, :, self.start : stop]
        return torch.unflatten(block, 1, (self.num_rows, self.row_tokens)).transpose(0, 1)


def blocks_of(lengths: Sequence[int]) -> Iterator[Block]:
    first = start = 0
    for row in range(1, len(lengths) + 1):
        if row == len(lengths) or lengths[row] != lengths[first]:
            if lengths[first]:
                yield Block(start, row - first, lengths[first])
            start += (row - first) * lengths[first]
            first = row


def _inside(branch: Branch, packed_1HTD: Tensor) -> Tensor:
    return packed_1HTD[:, :, branch.start : branch.stop]


def _below(branch: Branch, packed_1HTD: Tensor) -> Tensor:
    return packed_1HTD[:, :, branch.stop : branch.end]


class _SharedPrompt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_1HTD: Tensor,
        prompt_k_1KPD: Tensor,
        prompt_v_1KPD: Tensor,
        k_1KTD: Tensor,
        v_1KTD: Tensor,
        spans: Spans,
        scale: float,
    ) -> Tensor:
        o_1HTD, lse_1HT = _over_prompt(q_1HTD, prompt_k_1KPD, prompt_v_1KPD, scale)
        for block in blocks_of(spans.lengths):
            q, k, v = (block.of(packed) for packed in (q_1HTD, k_1KTD, v_1KTD))
            _merge(block.of(o_1HTD), block.of(lse_1HT), *_flash(q, k, v, 0.0, True, scale=scale))
        for branch in spans.branches:
            q, o, lse = (_below(branch, packed) for packed in (q_1HTD, o_1HTD, lse_1HT))
            k, v = (_inside(branch, packed) for packed in (k_1KTD, v_1KTD))
            _merge(o, lse, *_flash(q, k, v, 0.0, False, scale=scale))
        ctx.save_for_backward(q_1HTD, prompt_k_1KPD, prompt_v_1KPD, k_1KTD, v_1KTD, o_1HTD, lse_1HT)
        ctx.spans, ctx.scale = spans, scale
        return o_1HTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_1HTD: Tensor) -> tuple[Tensor | None, ...]:
        q, prompt_k, prompt_v, k, v, o, lse = ctx.saved_tensors
        dq, dprompt_k, dprompt_v = _prompt_backward(
            do_1HTD, q, prompt_k, prompt_v, o, lse, ctx.scale
        )
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for block in blocks_of(ctx.spans.lengths):
            given = [block.of(packed) for packed in (do_1HTD, q, k, v, o)]
            grads = _flash_backward(*given, block.of(lse), 0.0, True, scale=ctx.scale)
            block.of(dq).add_(grads[0])
            block.of(dk).copy_(grads[1])
            block.of(dv).copy_(grads[2])
        for branch in ctx.spans.branches:
            below = [_below(branch, packed) for packed in (do_1HTD, q, o, lse)]
            inside = [_inside(branch, packed) for packed in (k, v)]
            grads = _flash_backward(*below[:2], *inside, *below[2:], 0.0, False, scale=ctx.scale)
            _below(branch, dq).add_(grads[0])
            _inside(branch, dk).add_(grads[1])
            _inside(branch, dv).add_(grads[2])
        return dq, dprompt_k, dprompt_v, dk, dv, None, None


def _over_prompt(
    q_1HTD: Tensor, k_1KPD: Tensor, v_1KPD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, in the strides that the backward kernel reads."""
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
    """Into the first two, which hold the prompt's part."""
    weight = torch.sigmoid(own_lse_NHR - lse_NHR).unsqueeze(-1)
    merged = torch.lerp(o_NHRD.to(weight.dtype), own_NHRD.to(weight.dtype), weight)
    o_NHRD.copy_(merged)
    lse_NHR.copy_(torch.logaddexp(lse_NHR, own_lse_NHR))
