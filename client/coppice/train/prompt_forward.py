"""Prompt forward, with or without a graph, and backward with injected gradients."""

from typing import Any

import torch

from coppice.train.attention_contexts import InjectingContext, PromptContext
from coppice.train.groups import TrainingGroup
from coppice.train.hf_attention import forward
from coppice.train.micro_batches import prompt_inputs
from coppice.train.model_info import get_model_info
from coppice.train.prompt_kv import Layers, PromptKV, layers_of


def compute_layers(model: Any, group: TrainingGroup) -> Layers:
    """Computes the KV of the prompt without its last token.

    It has a graph if gradients are enabled. The result is empty for a prompt of one token.
    """
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
    """Runs the prompt's forward and its backward with the leaves' gradients; returns the KV."""
    if not leaves:
        return ()
    model_info = get_model_info(model)
    context = InjectingContext(model_info.num_layers, len(group.prompt) - 1, leaves)
    logits_TV = forward(model, prompt_inputs(group, model_info.device), context)
    assert logits_TV is not None, "an injecting forward runs to its end"
    made = context.pop_layers()
    # The loss does not depend on these logits; a backward of zeros triggers the injections.
    logits_TV.backward(torch.zeros_like(logits_TV))  # type: ignore[no-untyped-call]
    return made
