"""Registration of shared-prompt attention in Hugging Face models, and forwards that use it.

The attention is registered without a mask function, so models pass no mask. Their own functions
would detect packed rows from position_ids and build a dense mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from coppice.train.attention.forward_contexts import AttentionContext, StopForward, UnsupportedModel
from coppice.train.attention.windows_and_sinks import LayerAttention
from coppice.train.packed_row import Inputs
from coppice.train.routing import has_routers, hooked_routers, select_experts

NAME = "coppice"
_NO_DROPOUT = "dropout is not supported, because the prompt may be computed twice: set it to 0"

# Arguments that indicate anything but plain causal softmax attention.
_UNSUPPORTED_ARGUMENTS = (
    "attention_mask",
    "softcap",
    "position_bias",
    "head_mask",
    "cu_seq_lens_q",
)


@contextmanager
def attending(model: Any) -> Iterator[None]:
    """Context manager in which the model's layers use attention contexts.

    Backwards that recompute layers must also run in this scope.
    """
    check_model(model)
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        # Hooked once: a backward that computes a layer again may run in the outer scope only.
        with nullcontext() if before == NAME else hooked_routers(model):
            yield
    finally:
        config._attn_implementation = before


def is_attending(model: Any) -> bool:
    return bool(model.config._attn_implementation == NAME)


def check_model(model: Any) -> None:
    if model.config.get_text_config() is not model.config:
        raise UnsupportedModel("only text models are supported")
    dropout = (module for module in model.modules() if isinstance(module, nn.Dropout))
    if any(module.p and module.training for module in dropout):
        raise UnsupportedModel(_NO_DROPOUT)


def forward(model: Any, inputs: Inputs, context: AttentionContext) -> Tensor | None:
    """Runs a model with an attention context; returns logits_TV at the target positions.

    Returns None if the context ended the forward early.
    """
    if inputs.experts is not None and not has_routers(model):
        raise UnsupportedModel("the group has routed experts, but the model has no known router")
    context.experts = inputs.experts
    try:
        logits_1TV = model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            logits_to_keep=inputs.logits_to_keep,
            coppice=context,
        ).logits
    except StopForward:
        logits_1TV = None
    finally:
        select_experts(None)
    context.check_seen()
    return None if logits_1TV is None else logits_1TV[0]


def _attention(
    module: nn.Module,
    q_1HTD: Tensor,
    k_1KTD: Tensor,
    v_1KTD: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    coppice: AttentionContext | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    if coppice is None:
        raise UnsupportedModel("the model does not pass its keyword arguments to attention")
    _check_attention(dropout, {"attention_mask": attention_mask, **rest})
    _check_layer(module, sliding_window, coppice.max_row_tokens)
    index = int(module.layer_idx)  # type: ignore[arg-type]
    coppice.layers_seen.add(index)
    select_experts(coppice.experts)  # here, because a backward may compute the layer again
    layer = LayerAttention(
        scale=q_1HTD.shape[-1] ** -0.5 if scaling is None else scaling,
        window=_window_within(sliding_window, coppice.max_row_tokens),
        sinks_H=s_aux,
    )
    o_1HTD = coppice.attend(index, q_1HTD, k_1KTD, v_1KTD, layer)
    return o_1HTD.transpose(1, 2).contiguous(), None


def _window_within(window: int | None, num_tokens: int) -> int | None:
    """The window, or None if it covers all rows."""
    return None if window is None or window >= num_tokens else window


def _check_attention(dropout: float, rest: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedModel(_NO_DROPOUT)
    if other := [name for name in _UNSUPPORTED_ARGUMENTS if rest.get(name) is not None]:
        raise UnsupportedModel(f"attention with {', '.join(other)} is not supported")


def _check_layer(module: nn.Module, sliding_window: int | None, max_row_tokens: int) -> None:
    """Refuses layers whose mask is not the causal one of the given window.

    Models pass no mask here, so a mask that is not passed as a window would be ignored.
    """
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel("attention that is not causal is not supported")
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    kind = types[int(module.layer_idx)] if types else "sliding_attention"  # type: ignore[arg-type]
    if kind not in ("full_attention", "sliding_attention"):
        raise UnsupportedModel(f"layers of type {kind} are not supported")
    expected = _window_within(getattr(config, "sliding_window", None) or None, max_row_tokens)
    if kind == "sliding_attention" and sliding_window is None and expected is not None:
        raise UnsupportedModel("the model does not pass its sliding window to attention")


AttentionInterface.register(NAME, _attention)
