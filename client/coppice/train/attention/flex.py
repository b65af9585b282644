"""Attention of packed responses or tree segments on CUDA, in one FlexAttention call per layer.

Blocks without a visible query-key pair are skipped. FlexAttention has no backward on CPU, so
coppice.train.attention.shared_prompt is used there.

Shapes: T queries, S keys, H query heads, K KV heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from coppice.train.attention.windows_and_sinks import LayerAttention
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
    index of the prompt that the query at this position reads. position_S is the position in the
    sequence. The first num_before keys have no query.
    """

    last_reader_S: Tensor
    prompt_S: Tensor
    prompt_read_S: Tensor
    position_S: Tensor
    num_before: int

    def visible(self, window: int | None) -> Visible:
        """FlexAttention mask function. It relies on prompts preceding all other tokens."""
        last_reader_S, prompt_S, prompt_read_S, position_S = (
            self.last_reader_S,
            self.prompt_S,
            self.prompt_read_S,
            self.position_S,
        )
        num_before = self.num_before

        # FlexAttention counts the parameters of the function, including a method's self.
        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place = query + num_before
            return (key <= place) & (
                (place < last_reader_S[key]) | (prompt_S[key] == prompt_read_S[place])
            )

        if window is None:
            return visible

        def in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            distance = position_S[query + num_before] - position_S[key]
            return visible(batch, head, query, key) & (distance < window)

        return in_window


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
    positions = [torch.arange(prompt) for prompt in prompts]
    positions += [spans.depths() + prompt for prompt, spans in groups]
    return Layout(
        last_reader_S=torch.cat([ends, *below]).to(device),
        prompt_S=torch.cat([own, torch.full_like(reads, -1)]).to(device),
        prompt_read_S=torch.cat([own, reads]).to(device),
        position_S=torch.cat(positions).to(device),
        num_before=0,
    )


class FlexAttention:
    """FlexAttention in one forward of a model, with one block mask for all layers of a window."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._compiled = layout.last_reader_S.device.type == "cuda"
        self._masks: dict[int | None, BlockMask] = {}

    def __call__(
        self, q_1HTD: Tensor, k_1KSD: Tensor, v_1KSD: Tensor, layer: LayerAttention
    ) -> Tensor:
        """Returns the attention output o_1HTD of one layer."""
        if layer.window not in self._masks:
            self._masks[layer.window] = self._mask(layer.window)
        o_1HTD, aux = _attention(self._compiled)(
            q_1HTD,
            k_1KSD,
            v_1KSD,
            block_mask=self._masks[layer.window],
            scale=layer.scale,
            enable_gqa=True,
            return_aux=AuxRequest(lse=layer.sinks_H is not None),
        )
        if layer.sinks_H is None:
            return cast(Tensor, o_1HTD)
        share_1HT = torch.sigmoid(aux.lse - layer.sinks_H.to(aux.lse.dtype)[:, None])
        return cast(Tensor, o_1HTD * share_1HT.unsqueeze(-1).to(o_1HTD.dtype))

    def _mask(self, window: int | None) -> BlockMask:
        keys, device = len(self._layout.last_reader_S), self._layout.last_reader_S.device
        mask: BlockMask = _mask_maker(self._compiled)(
            self._layout.visible(window),
            None,
            None,
            keys - self._layout.num_before,
            keys,
            device=device,
        )
        return mask


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
