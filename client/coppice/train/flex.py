"""Attention of packed rows on CUDA: one FlexAttention call over rows of any lengths.

Blocks that no query of theirs may read are not computed. On CPU FlexAttention has no backward, and
attention.py is there instead.

Shapes: T queries, S keys, H query heads, K key and value heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def wants_flex(q_1HTD: Tensor) -> bool:
    return q_1HTD.device.type == "cuda" and q_1HTD.dtype != torch.float64


Visible: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether, in a batch and a head, a query reads a key: as FlexAttention asks it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """The row that each key is of, and the row that its query reads beside its own.

    The first num_before keys have no query.
    """

    row_S: Tensor
    reads_S: Tensor
    num_before: int

    @property
    def visible(self) -> Visible:
        """Prompts lie before their rows."""
        row_S, reads_S, num_before = self.row_S, self.reads_S, self.num_before

        # FlexAttention counts the parameters, and would count a method's self.
        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = query + num_before
            row = row_S[key]
            return (key <= place) & ((row == row_S[place]) | (row == reads_S[place]))

        return visible


def response_layout(prompt_tokens: int, lengths: Sequence[int], device: torch.device) -> Layout:
    """Of the prompt's keys, then the responses: row 0 is the prompt."""
    rows = torch.tensor([prompt_tokens, *lengths], device=device)
    row_S = torch.arange(len(rows), device=device).repeat_interleave(rows)
    return Layout(row_S=row_S, reads_S=torch.zeros_like(row_S), num_before=prompt_tokens)


def packed_layout(groups: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> Layout:
    """Of all prompts, then all responses; row i is the prompt of group i."""
    prompts = [prompt for prompt, _ in groups]
    lengths = [length for _, lengths in groups for length in lengths]
    owners = [group for group, (_, lengths) in enumerate(groups) for _ in lengths]
    rows = torch.tensor([*prompts, *lengths], device=device)
    reads = torch.tensor([*range(len(prompts)), *owners], device=device)
    row_S = torch.arange(len(rows), device=device).repeat_interleave(rows)
    return Layout(row_S=row_S, reads_S=reads.repeat_interleave(rows), num_before=0)


class FlexAttention:
    """Of one forward: its layers share the mask."""

    def __init__(self, layout: Layout) -> None:
        keys = len(layout.row_S)
        device = layout.row_S.device
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
