"""Replay of the engine's expert choices (MoE routing) in a Transformers model under training.

The trainer's router may select other experts than the engine's did: after an update of its weights,
or by rounding. Its logprobs are then those of another computation. Here each router uses the
experts that the engine selected, with its own weights for them, so gradients reach the router.

Shapes: T tokens, L layers, E experts, K experts per token.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ROUTERS = ("Qwen3MoeTopKRouter",)
"""Class names of routers that return (logits_TE, weights_TK, experts_TK)."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class _Selected(threading.local):
    """Experts of the forward in progress. A backward may recompute layers in another thread."""

    experts_TLK: Tensor | None = None


_SELECTED = _Selected()


def select_experts(experts_TLK: Tensor | None) -> None:
    """Sets the experts for the layers that this thread computes from now on."""
    _SELECTED.experts_TLK = experts_TLK


def has_routers(model: nn.Module) -> bool:
    return any(type(module).__name__ in ROUTERS for module in model.modules())


@contextmanager
def hooked_routers(model: nn.Module) -> Iterator[None]:
    """Context manager in which the model's routers use selected experts, if there are any."""
    handles = [
        module.register_forward_hook(_hook(int(found[1])))
        for name, module in model.named_modules()
        if type(module).__name__ in ROUTERS and (found := _LAYER.search(name))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replay_routing(model: nn.Module, experts_TLK: Tensor) -> Iterator[None]:
    """Context manager in which forwards of T tokens use the given experts.

    The tokens are those of `input_ids`, flattened. Raises ValueError if the model's routers are not
    supported.
    """
    if not has_routers(model):
        raise ValueError(f"the model has no router of the types {', '.join(ROUTERS)}")
    select_experts(experts_TLK)
    try:
        with hooked_routers(model):
            yield
    finally:
        select_experts(None)


def _hook(layer: int) -> Any:
    def hook(router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        if _SELECTED.experts_TLK is None:
            return None
        logits_TE, weights_TK, _ = output
        experts_TK = _SELECTED.experts_TLK[:, layer].to(logits_TE.device, torch.int64)
        if experts_TK.shape != weights_TK.shape:
            raise ValueError(
                f"experts of shape {tuple(experts_TK.shape)} for a router that selects "
                f"{tuple(weights_TK.shape)}"
            )
        chosen_TK = torch.softmax(logits_TE, -1, dtype=torch.float32).gather(1, experts_TK)
        if router.norm_topk_prob:
            chosen_TK = chosen_TK / chosen_TK.sum(-1, keepdim=True)
        return logits_TE, chosen_TK.to(weights_TK.dtype), experts_TK

    return hook
