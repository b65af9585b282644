"""The forward of a prompt, with or without its graph, and the backward that is let into one."""

from typing import Any

import torch

from coppice.train.contexts import InjectingContext, PromptContext
from coppice.train.groups import TrainingGroup
from coppice.train.hf_attention import forward
from coppice.train.micro_batches import prompt_inputs
from coppice.train.model_info import get_model_info
from coppice.train.prompt_kv import Layers, PromptKV, layers_of


def compute_layers(model: Any, group: TrainingGroup) -> Layers:
    """Of the prompt but its last token, with a graph where gradients are on; none of no tokens."""
    model_info = get_model_info(model)
    num_tokens = len(group.prompt) - 1
    if not num_tokens:
        if model_info.sharded:
            raise ValueError("ranks that share a model need prompts of at least two tokens")
        return ()
    context = PromptContext(
        model_info.num_layers, num_tokens, can_stop_early=model_info.can_stop_early
    )
    forward(model, prompt_inputs(group, model_info.device), context)
    return context.pop_layers()


def given_layers(model: Any, group: TrainingGroup, prompt_kv: PromptKV) -> Layers:
    model_info = get_model_info(model)
    num_tokens = len(group.prompt) - 1
    prompt_kv.check(model_info.num_layers, num_tokens, model_info.dtype)
    return layers_of(prompt_kv, model_info.device) if num_tokens else ()


def no_grad_layers(model: Any, group: TrainingGroup, prompt_kv: PromptKV | None) -> Layers:
    if prompt_kv is not None:
        return given_layers(model, group, prompt_kv)
    with torch.no_grad():
        return compute_layers(model, group)


def inject(model: Any, group: TrainingGroup, leaves: Layers) -> Layers:
    """Computes the prompt, and its backward with the leaves' gradients; what was computed."""
    if not leaves:
        return ()
    model_info = get_model_info(model)
    context = InjectingContext(model_info.num_layers, len(group.prompt) - 1, leaves)
    logits_TV = forward(model, prompt_inputs(group, model_info.device), context)
    assert logits_TV is not None, "an injecting forward runs to its end"
    made = context.pop_layers()
    # Nothing comes from the logits; their backward only passes by where the gradients are added.
    logits_TV.backward(torch.zeros_like(logits_TV))  # type: ignore[no-untyped-call]
    return made
