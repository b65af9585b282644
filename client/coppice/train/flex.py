"""Attention of packed rows on CUDA: one FlexAttention call over rows of any lengths.

Blocks that no query of theirs may read are not computed. On CPU FlexAttention has no backward, and
attention.py is there instead.

Shapes: T queries, S keys, H query heads, K key and value heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from coppice.train.spans import Spans


def wants_flex(q_1HTD: Tensor) -> bool:
    return q_1HTD.device.type == "cuda" and q_1HTD.dtype != torch.float64


Visible: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether, in a batch and a head, a query reads a key: as FlexAttention asks it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """What reads each key: queries behind it, up to its end, and those that read its prompt.

    prompt_S numbers the prompt that a key is of, or is -1; reads_S the one that its query reads.
    The first num_before keys have no query.
    """

    last_reader_S: Tensor
    prompt_S: Tensor
    prompt_read_S: Tensor
    num_before: int

    @property
    def visible(self) -> Visible:
        """Prompts lie before all else."""
        last_reader_S, prompt_S, prompt_read_S = (
            self.last_reader_S,
            self.prompt_S,
            self.prompt_read_S,
        )
        num_before = self.num_before

        # FlexAttention counts the parameters, and would count a method's self.
        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = query + num_before
            return (key <= place) & (
                (place < last_reader_S[key]) | (prompt_S[key] == prompt_read_S[place])
            )

        return visible


def response_layout(prompt_tokens: int, spans: Spans, device: torch.device) -> Layout:
    """Of the prompt's keys, then the responses."""
    layout = packed_layout([(prompt_tokens, spans)], device)
    return replace(layout, num_before=prompt_tokens)


def packed_layout(groups: Sequence[tuple[int, Spans]], device: torch.device) -> Layout:
    """Of all prompts, then all responses."""
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
    """Of one forward: its layers share the mask."""

    def __init__(self, layout: Layout) -> None:
        keys = len(layout.last_reader_S)
        device = layout.last_reader_S.device
        self._compiled = device.type == "cuda"
        self._mask: BlockMask = _mask_maker(self._compiled)(
            layout.visible, None, None, keys - layout.num_before, keys, device=device
        )

    def __call__(self, q_1HTD: Tensor, k_1KSD: Tensor, v_1KSD: Tensor, scale: float) -> Tensor:
        """o_1HTD."""
        output: Tensor = _attention(self._compiled)(
            q_1HTD, k_1KSD, v_1KSD, block_mask=self._mask, scale=scale, enable_gqa=True
        )
        return output


# Dynamic: otherwise every new length of a row is compiled anew.
@cache
def _attention(compiled: bool) -> Callable[..., Any]:
    if compiled:
        return torch.compile(flex_attention, dynamic=True)
    return flex_attention


# Uncompiled, this makes the dense mask on its way.
@cache
def _mask_maker(compiled: bool) -> Callable[..., Any]:
    if compiled:
        return torch.compile(create_block_mask, dynamic=True)
    return create_block_mask
