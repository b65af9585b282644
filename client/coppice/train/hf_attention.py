"""Registration of contexts as an attention implementation of unmodified Hugging Face models.

The attention function is registered by name, without a mask function, so models pass no mask.
Their own mask functions would detect packed rows from position_ids and build a dense mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from coppice.train.attention_contexts import AttentionContext, StopForward, UnsupportedModel
from coppice.train.micro_batches import Inputs

NAME = "coppice"
# Arguments that indicate anything but plain causal softmax attention.
_UNSUPPORTED_ARGUMENTS = (
    "attention_mask",
    "softcap",
    "s_aux",
    "position_bias",
    "head_mask",
    "cu_seq_lens_q",
)


@contextmanager
def attending(model: Any) -> Iterator[None]:
    """Makes the model's attention use contexts in this scope.

    Backwards that recompute layers must also run in this scope.
    """
    check_model(model)
    config = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def is_attending(model: Any) -> bool:
    return bool(model.config._attn_implementation == NAME)


def check_model(model: Any) -> None:
    if model.config.get_text_config() is not model.config:
        raise UnsupportedModel("only models of text alone are supported")
    dropout = (module for module in model.modules() if isinstance(module, nn.Dropout))
    if any(module.p and module.training for module in dropout):
        raise UnsupportedModel("with dropout a prompt computed twice is not the same prompt")


def forward(model: Any, inputs: Inputs, context: AttentionContext) -> Tensor | None:
    """Returns logits_TV at the target positions, or None if the context ended the forward early."""
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
    coppice: AttentionContext | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    if coppice is None:
        raise UnsupportedModel("the model does not hand its keyword arguments on to attention")
    _check_attention(coppice, dropout, sliding_window, {"attention_mask": attention_mask, **rest})
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    coppice.layers_seen.add(layer)
    scale = q_1HTD.shape[-1] ** -0.5 if scaling is None else scaling
    o_1HTD = coppice.attend(layer, q_1HTD, k_1KTD, v_1KTD, scale)
    return o_1HTD.transpose(1, 2).contiguous(), None


def _check_attention(
    context: AttentionContext, dropout: float, sliding_window: int | None, rest: dict[str, Any]
) -> None:
    if dropout:
        raise UnsupportedModel("with dropout a prompt computed twice is not the same prompt")
    if sliding_window is not None and sliding_window < context.max_row_tokens:
        raise UnsupportedModel(
            f"a window of {sliding_window} tokens is shorter than a row of {context.max_row_tokens}"
        )
    if other := [name for name in _UNSUPPORTED_ARGUMENTS if rest.get(name) is not None]:
        raise UnsupportedModel(f"attention with {', '.join(other)} is not supported")


AttentionInterface.register(NAME, _attention)
