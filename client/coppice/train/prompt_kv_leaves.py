"""Prompt keys and values as autograd leaf tensors, and backpropagation of their gradients.

Shapes: P covered tokens (the prompt without its last token), K KV heads, D head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptKV:
    """Keys and values [K, P, D] of a prompt in every layer; keys are after rotary embedding.

    Layers may have different shapes. A layer with a sliding window needs only the last tokens.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def of_named(cls, tensors: Mapping[str, Tensor]) -> "PromptKV":
        """Builds the prompt KV from tensors named k.0, v.0, k.1 and so on."""
        layers = range(len(tensors) // 2)
        return cls(
            keys=tuple(tensors[f"k.{layer}"] for layer in layers),
            values=tuple(tensors[f"v.{layer}"] for layer in layers),
        )

    def check(self, num_layers: int, num_tokens: int, dtype: torch.dtype) -> None:
        """Raises ValueError unless the KV fits the model's layers and dtype, and the prompt."""
        if not len(self.keys) == len(self.values) == num_layers:
            raise ValueError(
                f"the prompt KV has {len(self.keys)} layers, and the model {num_layers}"
            )
        for tensor in (*self.keys, *self.values):
            if tensor.ndim != 3 or tensor.shape[1] > num_tokens:
                raise ValueError(
                    f"the prompt KV has the shape {list(tensor.shape)},"
                    f" not [kv_heads, {num_tokens}, head_dim]"
                )
            if tensor.dtype != dtype:
                raise ValueError(
                    f"the prompt KV is {tensor.dtype} and the model {dtype}; the conversion is an"
                    " approximation, so the caller must do it"
                )


Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [1, K, P, D] of every layer, as attention functions receive them."""


def layers_of(prompt_kv: PromptKV, device: torch.device) -> Layers:
    pairs = zip(prompt_kv.keys, prompt_kv.values, strict=True)
    return [(k.to(device).unsqueeze(0), v.to(device).unsqueeze(0)) for k, v in pairs]


def prompt_kv_of(layers: Layers) -> PromptKV:
    return PromptKV(
        keys=tuple(k[0].detach().contiguous() for k, _ in layers),
        values=tuple(v[0].detach().contiguous() for _, v in layers),
    )


def leaves_of(layers: Layers) -> Layers:
    """Detaches prompt KV into autograd leaves, which share storage and accumulate `.grad`."""
    return [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in layers]


def backward_through(layers: Layers, leaves: Layers) -> None:
    """Backpropagates the gradients of detached prompt KV (`leaves`) through the prompt forward."""
    pairs = [
        (made, with_first_tokens(leaf.grad, made))
        for made_pair, leaf_pair in zip(layers, leaves, strict=True)
        for made, leaf in zip(made_pair, leaf_pair, strict=True)
        # A frozen layer has no graph; a loss that reads no prompt KV leaves no gradient.
        if made.requires_grad and leaf.grad is not None
    ]
    if pairs:
        torch.autograd.backward([made for made, _ in pairs], [grad for _, grad in pairs])


def with_first_tokens(grad: Tensor, of: Tensor) -> Tensor:
    """Gradient of all tokens of keys or values, given that of the last ones that were read."""
    return F.pad(grad, (0, 0, of.shape[2] - grad.shape[2], 0))


def relative_error(layers: Layers, exact: Layers) -> float:
    """Relative L2 error of the keys and values of all layers; 0 if there are none.

    `exact` may have more tokens, at the start.
    """
    difference = total = 0.0
    for pair, exact_pair in zip(layers, exact, strict=True):
        for tensor, exact_tensor in zip(pair, exact_pair, strict=True):
            num_missing = exact_tensor.shape[2] - tensor.shape[2]
            wide = exact_tensor[:, :, num_missing:].detach().float()
            difference += (tensor.detach().float() - wide).square().sum().item()
            total += wide.square().sum().item()
    return float((difference / total) ** 0.5) if total else 0.0
