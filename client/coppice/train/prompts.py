"""The forward of a prompt, with or without its graph, and the backward that is let into one."""

from typing import Any

import torch

from coppice.train.contexts import InjectingContext, PromptContext
from coppice.train.groups import TrainingGroup
from coppice.train.hf_attention import forward
from coppice.train.micro_batches import prompt_inputs
from coppice.train.model_info import traits_of
from coppice.train.prompt_kv import Layers, PromptKV, layers_of


def compute_layers(model: Any, group: TrainingGroup) -> Layers:
    """Of the prompt but its last token, with a graph where gradients are on; none of no tokens."""
    traits = traits_of(model)
    num_tokens = len(group.prompt) - 1
    if not num_tokens:
        if traits.sharded:
            raise ValueError("ranks that share a model need prompts of at least two tokens")
        return ()
    context = PromptContext(traits.num_layers, num_tokens, may_stop=traits.may_stop)
    forward(model, prompt_inputs(group, traits.device), context)
    return context.take()


def given_layers(model: Any, group: TrainingGroup, prompt_kv: PromptKV) -> Layers:
    traits = traits_of(model)
    num_tokens = len(group.prompt) - 1
    prompt_kv.check(traits.num_layers, num_tokens, traits.dtype)
    return layers_of(prompt_kv, traits.device) if num_tokens else ()


def no_grad_layers(model: Any, group: TrainingGroup, prompt_kv: PromptKV | None) -> Layers:
    if prompt_kv is not None:
        return given_layers(model, group, prompt_kv)
    with torch.no_grad():
        return compute_layers(model, group)


def inject(model: Any, group: TrainingGroup, leaves: Layers) -> Layers:
    """Computes the prompt, and its backward with the leaves' gradients; what was computed."""
    if not leaves:
        return ()
    traits = traits_of(model)
    context = InjectingContext(traits.num_layers, len(group.prompt) - 1, leaves)
    logits_TV = forward(model, prompt_inputs(group, traits.device), context)
    assert logits_TV is not None, "an injecting forward runs to its end"
    made = context.take()
    # Nothing comes from the logits; their backward only passes by where the gradients are added.
    logits_TV.backward(torch.zeros_like(logits_TV))  # type: ignore[no-untyped-call]
    return made
