"""Attention of packed rows on CUDA: one FlexAttention call for rows of any lengths.

Blocks without a visible query-key pair are skipped. FlexAttention has no backward on CPU, so
coppice.train.attention is used there.

Shapes: T queries, S keys, H query heads, K KV heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from coppice.train.packed_row import Spans


def wants_flex(q_1HTD: Tensor) -> bool:
    return q_1HTD.device.type == "cuda" and q_1HTD.dtype != torch.float64


Visible: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention mask_mod: True if a query reads a key, given batch, head, query and key index."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Keys of a packed row that each query reads, as tensors for a FlexAttention mask.

    A key is read by later queries before last_reader_S[key], and by the queries that read its
    prompt. prompt_S is the index of the prompt to which a key belongs, or -1. prompt_read_S is the
    index of the prompt that the query at this position reads. The first num_before keys have no
    query.
    """

    last_reader_S: Tensor
    prompt_S: Tensor
    prompt_read_S: Tensor
    num_before: int

    @property
    def visible(self) -> Visible:
        """FlexAttention mask function. It relies on prompts preceding all other tokens."""
        last_reader_S, prompt_S, prompt_read_S = (
            self.last_reader_S,
            self.prompt_S,
            self.prompt_read_S,
        )
        num_before = self.num_before

        # FlexAttention counts the parameters of the function, including a method's self.
        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = query + num_before
            return (key <= place) & (
                (place < last_reader_S[key]) | (prompt_S[key] == prompt_read_S[place])
            )

        return visible


def response_layout(prompt_tokens: int, spans: Spans, device: torch.device) -> Layout:
    """Layout of a row of responses whose prompt has keys but no queries."""
    layout = packed_layout([(prompt_tokens, spans)], device)
    return replace(layout, num_before=prompt_tokens)


def packed_layout(groups: Sequence[tuple[int, Spans]], device: torch.device) -> Layout:
    """Layout of a row with all prompts, followed by all responses."""
    prompts = [prompt for prompt, _ in groups]
    responses = [spans.num_tokens for _, spans in groups]
    starts = [0, *accumulate([*prompts, *responses])]
    own = torch.arange(len(groups)).repeat_interleave(torch.tensor(prompts))
    reads = torch.arange(len(groups)).repeat_interleave(torch.tensor(responses))
    ends = torch.tensor(starts[1 : len(groups) + 1]).repeat_interleave(torch.tensor(prompts))
    below = [
        spans.ends() + start
        for (_, spans), start in zip(groups, starts[len(groups) :], strict=False)
    ]
    return Layout(
        last_reader_S=torch.cat([ends, *below]).to(device),
        prompt_S=torch.cat([own, torch.full_like(reads, -1)]).to(device),
        prompt_read_S=torch.cat([own, reads]).to(device),
        num_before=0,
    )


class FlexAttention:
    """FlexAttention in one forward of a model, with one block mask for all layers."""

    def __init__(self, layout: Layout) -> None:
        keys = len(layout.last_reader_S)
        device = layout.last_reader_S.device
        self._compiled = device.type == "cuda"
        self._mask: BlockMask = _mask_maker(self._compiled)(
            layout.visible, None, None, keys - layout.num_before, keys, device=device
        )

    def __call__(self, q_1HTD: Tensor, k_1KSD: Tensor, v_1KSD: Tensor, scale: float) -> Tensor:
        """Returns the attention output o_1HTD of one layer."""
        output: Tensor = _attention(self._compiled)(
            q_1HTD, k_1KSD, v_1KSD, block_mask=self._mask, scale=scale, enable_gqa=True
        )
        return output


# dynamic=True avoids a recompilation per row length.
@cache
def _attention(compiled: bool) -> Callable[..., Any]:
    if compiled:
        return torch.compile(flex_attention, dynamic=True)
    return flex_attention


# Without compilation, create_block_mask materializes the dense mask.
@cache
def _mask_maker(compiled: bool) -> Callable[..., Any]:
    if compiled:
        return torch.compile(create_block_mask, dynamic=True)
    return create_block_mask
