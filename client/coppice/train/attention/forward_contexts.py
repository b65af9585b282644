"""Attention of one model forward, for a prompt, its responses, or several packed groups.

A context is passed to the model as a keyword argument. It thus reaches every layer, is captured by
activation checkpointing, and is the same object when a layer is recomputed, on any thread.

Shapes: T tokens of the row, P prompt tokens, H query heads, K KV heads, D head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coppice.train.attention.flex import FlexAttention, packed_layout, response_layout, wants_flex
from coppice.train.attention.shared_prompt import causal_attention, shared_prompt_attention
from coppice.train.attention.windows_and_sinks import LayerAttention
from coppice.train.packed_row import Spans
from coppice.train.prompt_kv_leaves import Layers, with_first_tokens


class UnsupportedModel(ValueError):
    """The model has an operation whose result would differ if the prompt is shared."""


class StopForward(Exception):
    """Raised to end a forward early, once the last layer's keys and values are collected."""


class AttentionContext(ABC):
    """Implementation of the attention of all layers of a model, for one forward.

    `layers_seen` collects the layers that called `attend`. `experts` are those that routers select,
    for each token of the forward.
    """

    def __init__(self, num_layers: int, max_row_tokens: int) -> None:
        self.num_layers = num_layers
        self.max_row_tokens = max_row_tokens
        self.layers_seen: set[int] = set()
        self.experts: Tensor | None = None

    @abstractmethod
    def attend(
        self, index: int, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, layer: LayerAttention
    ) -> Tensor:
        """Returns the attention output o_1HTD of the layer with this index."""

    def check_seen(self) -> None:
        if self.layers_seen != set(range(self.num_layers)):
            raise UnsupportedModel(
                f"{len(self.layers_seen)} of {self.num_layers} layers use the attention interface;"
                " the other layers would ignore the prompt"
            )


class PromptContext(AttentionContext):
    """Attention in the forward of a prompt, which collects the prompt's keys and values.

    With can_stop_early the forward ends after the last layer's keys and values.
    """

    def __init__(self, num_layers: int, max_row_tokens: int, *, can_stop_early: bool) -> None:
        super().__init__(num_layers, max_row_tokens)
        self.can_stop_early = can_stop_early
        self.is_taken = False
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._flex: FlexAttention | None = None

    def attend(
        self, index: int, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, layer: LayerAttention
    ) -> Tensor:
        # The backward of a checkpointed layer calls this again.
        if not self.is_taken:
            self.layers[index] = k_1KTD, v_1KTD
        if self.can_stop_early and len(self.layers) == self.num_layers:
            raise StopForward
        if wants_flex(q_1HTD) and not layer.is_plain:
            nothing = Spans(lengths=())
            self._flex = self._flex or FlexAttention(
                packed_layout([(q_1HTD.shape[2], nothing)], q_1HTD.device)
            )
            return self._flex(q_1HTD, k_1KTD, v_1KTD, layer)
        return causal_attention(q_1HTD, k_1KTD, v_1KTD, layer)

    def pop_layers(self) -> Layers:
        """Returns the collected keys and values of all layers; may be called only once.

        The graph of a checkpoint references its context, so a context that kept tensors of that
        graph would be a reference cycle and leak both.
        """
        layers = [self.layers[index] for index in range(self.num_layers)]
        self.is_taken = True
        self.layers.clear()
        return layers


class InjectingContext(PromptContext):
    """Attention in the forward of a prompt whose backward adds given gradients to keys and values.

    The gradients are those of `leaves`, detached keys and values that the responses have read.

    For graphs whose inner tensors are not accessible from outside, such as those of reentrant
    checkpoints, which first run without a graph.
    """

    def __init__(self, num_layers: int, max_row_tokens: int, leaves: Layers) -> None:
        super().__init__(num_layers, max_row_tokens, can_stop_early=False)
        self.leaves = leaves

    def attend(
        self, index: int, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, layer: LayerAttention
    ) -> Tensor:
        k_leaf, v_leaf = self.leaves[index]
        k_1KTD = _Inject.apply(k_1KTD, k_leaf.grad)  # type: ignore[no-untyped-call]
        v_1KTD = _Inject.apply(v_1KTD, v_leaf.grad)  # type: ignore[no-untyped-call]
        return super().attend(index, q_1HTD, k_1KTD, v_1KTD, layer)


class ResponseContext(AttentionContext):
    """Attention in the forward of packed responses to one prompt, whose KV is given.

    `prompt` is empty for a prompt of one token, which is part of the responses. Layers with a
    window may lack all but its last tokens.
    """

    def __init__(
        self,
        num_layers: int,
        max_row_tokens: int,
        prompt: Layers,
        num_prompt_tokens: int,
        spans: Spans,
    ) -> None:
        super().__init__(num_layers, max_row_tokens)
        self.prompt = prompt
        self.num_prompt_tokens = num_prompt_tokens
        self.spans = spans
        self._flex: dict[int, FlexAttention] = {}

    def attend(
        self, index: int, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, layer: LayerAttention
    ) -> Tensor:
        prompt = self.prompt[index] if self.prompt else (k_1KTD[:, :, :0], v_1KTD[:, :, :0])
        self._check_prompt(index, prompt[0].shape[2], layer.window)
        if wants_flex(q_1HTD):
            prompt_k, prompt_v = prompt
            num_tokens = prompt_k.shape[2]
            if num_tokens not in self._flex:
                layout = response_layout(num_tokens, self.spans, q_1HTD.device)
                self._flex[num_tokens] = FlexAttention(layout)
            keys, values = torch.cat([prompt_k, k_1KTD], 2), torch.cat([prompt_v, v_1KTD], 2)
            return self._flex[num_tokens](q_1HTD, keys, values, layer)
        return shared_prompt_attention(q_1HTD, prompt, k_1KTD, v_1KTD, self.spans, layer)

    def _check_prompt(self, index: int, num_tokens: int, window: int | None) -> None:
        needed = self.num_prompt_tokens
        if window is not None:
            needed = min(needed, window - 1)
        if num_tokens < needed:
            raise ValueError(
                f"the prompt KV of layer {index} has {num_tokens} tokens, and needs {needed}"
            )


class PackedContext(AttentionContext):
    """Attention of a forward pass over one packed row: first all prompts, then all responses.

    `groups` holds, per group, the number of prompt tokens and the spans of its responses.
    """

    def __init__(
        self, num_layers: int, max_row_tokens: int, groups: Sequence[tuple[int, Spans]]
    ) -> None:
        super().__init__(num_layers, max_row_tokens)
        self.groups = groups
        self._flex: FlexAttention | None = None
        self.sizes = [prompt for prompt, _ in groups] + [spans.num_tokens for _, spans in groups]

    def attend(
        self, index: int, q_1HTD: Tensor, k_1KTD: Tensor, v_1KTD: Tensor, layer: LayerAttention
    ) -> Tensor:
        if wants_flex(q_1HTD):
            self._flex = self._flex or FlexAttention(packed_layout(self.groups, q_1HTD.device))
            return self._flex(q_1HTD, k_1KTD, v_1KTD, layer)
        parts = list(
            zip(*(torch.split(x, self.sizes, 2) for x in (q_1HTD, k_1KTD, v_1KTD)), strict=True)
        )
        num_groups = len(self.groups)
        prompts = [causal_attention(q, k, v, layer) for q, k, v in parts[:num_groups]]
        responses = [
            shared_prompt_attention(q, (prompt_k, prompt_v), k, v, spans, layer)
            for (_, prompt_k, prompt_v), (q, k, v), (_, spans) in zip(
                parts[:num_groups], parts[num_groups:], self.groups, strict=True
            )
        ]
        return torch.cat([*prompts, *responses], 2)


class _Inject(torch.autograd.Function):
    """Identity function whose backward adds a given tensor to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor | None) -> Tensor:
        ctx.grad = grad
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return (dx if ctx.grad is None else dx + with_first_tokens(ctx.grad, dx)), None
