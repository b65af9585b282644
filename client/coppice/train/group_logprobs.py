"""Logprobs of responses with one prefill per prompt, with or without an autograd graph."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from coppice.train.attention.forward_contexts import (
    InjectingContext,
    PackedContext,
    PromptContext,
    ResponseContext,
)
from coppice.train.attention.huggingface_models import attending, forward, is_attending
from coppice.train.backward_memory import get_model_info
from coppice.train.data_parallel import is_sharded, max_passes_over_ranks, unwrap_ddp
from coppice.train.group_tree import max_row_tokens, subtrees_of
from coppice.train.packed_row import (
    concatenate_inputs,
    plan_subtree_passes,
    prompt_inputs,
    response_inputs,
)
from coppice.train.prompt_kv_leaves import Layers, PromptKV, layers_of, prompt_kv_of
from coppice.train.token_logprobs import response_token_logprobs
from coppice.train.training_group import RowLogprobs, TrainingGroup

# Measured on CPU: 100 tokens per micro-batch cost up to 43 % more time, 8,000 up to 32 % more.
PASS_TOKENS = 1024


def compute_layers(model: Any, group: TrainingGroup) -> Layers:
    """Computes the keys and values of a prompt without its last token.

    They have an autograd graph if gradients are enabled. The result is empty for a prompt of one
    token.
    """
    model_info = get_model_info(model)
    num_tokens = len(group.prompt) - 1
    if not num_tokens:
        if model_info.sharded:
            raise ValueError(
                "ranks that share a sharded model require prompts of at least two tokens"
            )
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
    """Recomputes a prompt and backpropagates the gradients of its KV; returns the KV.

    `leaves` is the detached KV of the prompt, whose `.grad` holds these gradients.
    """
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Responses of a group that are computed in one forward.

    A padding micro-batch does not contribute to the loss. It is run because other ranks of a
    sharded model need the collective calls.
    """

    rows: tuple[int, ...]
    is_padding: bool


def plan_micro_batches(model: Any, group: TrainingGroup, pass_tokens: int) -> list[MicroBatch]:
    planned = plan_subtree_passes(group, pass_tokens)
    num_idle = max_passes_over_ranks(model, len(planned)) - len(planned)
    if num_idle and not planned:
        raise ValueError(
            "ranks that share a sharded model require groups with at least one response token"
        )
    return [
        *(MicroBatch(rows=rows, is_padding=False) for rows in planned),
        *(MicroBatch(rows=planned[0], is_padding=True) for _ in range(num_idle)),
    ]


def response_logprobs(
    model: Any,
    group: TrainingGroup,
    rows: Sequence[int],
    prompt: Layers,
    temperature: float,
) -> RowLogprobs:
    model_info = get_model_info(model)
    inputs = response_inputs(group, rows, model_info.device)
    context = ResponseContext(
        model_info.num_layers, max_row_tokens(group), prompt, len(group.prompt) - 1, inputs.spans
    )
    logits_TV = forward(model, inputs, context)
    assert logits_TV is not None, "a response's forward runs to its end"
    logprobs_T = response_token_logprobs(group, rows, logits_TV, inputs.targets, temperature)
    return select_rows(group, rows, logprobs_T)


def select_rows(group: TrainingGroup, rows: Sequence[int], logprobs_T: Tensor) -> RowLogprobs:
    lengths = group.target_lengths
    return RowLogprobs(
        logprobs=logprobs_T, rows=tuple(rows), lengths=tuple(lengths[row] for row in rows)
    )


def merge_rows(group: TrainingGroup, parts: Iterable[RowLogprobs]) -> RowLogprobs:
    """Merges the logprobs of micro-batches into logprobs of all responses, in group order.

    `parts` may omit responses without tokens.
    """
    found = {row: part for rows in parts for row, part in zip(rows.rows, rows.split(), strict=True)}
    rows = tuple(range(len(group.responses)))
    ordered = [found[row] for row in rows if row in found]
    logprobs_T = torch.cat(ordered) if ordered else torch.zeros(0)
    return RowLogprobs(logprobs=logprobs_T, rows=rows, lengths=group.target_lengths)


def compute_prompt_kv(model: Any, group: TrainingGroup) -> PromptKV:
    """Computes a prompt's KV with the current weights, in the form that a server provides."""
    model = unwrap_ddp(model)
    with attending(model), torch.no_grad():
        return prompt_kv_of(compute_layers(model, group))


@torch.no_grad()
def group_logprobs(
    model: Any,
    group: TrainingGroup,
    prompt_kv: PromptKV | None = None,
    *,
    pass_tokens: int = PASS_TOKENS,
    temperature: float = 1.0,
) -> RowLogprobs:
    """Logprobs of all responses of a group, without an autograd graph.

    A given prompt_kv must have been computed with this model's weights.
    """
    model = unwrap_ddp(model)
    if not group.num_targets and not is_sharded(model):
        return merge_rows(group, [])
    with attending(model):
        prompt = no_grad_layers(model, group, prompt_kv)
        return merge_rows(
            group,
            [
                response_logprobs(model, group, each.rows, prompt, temperature)
                for each in plan_micro_batches(model, group, pass_tokens)
            ],
        )


def packed_logprobs(
    model: Any, groups: Sequence[TrainingGroup], *, temperature: float = 1.0
) -> list[RowLogprobs]:
    """Differentiable logprobs of several groups, packed into one row and one forward.

    For a model with activation checkpointing, run the backward inside attending(model), because it
    recomputes layers. Call this function inside the same scope.
    """
    model = unwrap_ddp(model)
    model_info = get_model_info(model)
    if not any(group.num_targets for group in groups):
        raise ValueError("all responses are empty or masked")
    if model_info.checkpointed and torch.is_grad_enabled() and not is_attending(model):
        raise ValueError("checkpointed model: call this and the backward inside attending(model)")
    rows = [tuple(chain.from_iterable(subtrees_of(group))) for group in groups]
    prompts = [prompt_inputs(group, model_info.device) for group in groups]
    responses = [
        response_inputs(group, all_rows, model_info.device)
        for group, all_rows in zip(groups, rows, strict=True)
    ]
    sizes = [
        (len(group.prompt) - 1, inputs.spans)
        for group, inputs in zip(groups, responses, strict=True)
    ]
    context = PackedContext(model_info.num_layers, max(map(max_row_tokens, groups)), sizes)
    inputs = concatenate_inputs([*prompts, *responses])
    with attending(model):
        logits_TV = forward(model, inputs, context)
    assert logits_TV is not None, "a packed forward runs to its end"
    parts = torch.split(logits_TV, [group.num_targets for group in groups])
    logprobs = [
        response_token_logprobs(group, all_rows, part_TV, response.targets, temperature)
        for group, all_rows, part_TV, response in zip(groups, rows, parts, responses, strict=True)
    ]
    return [
        merge_rows(group, [select_rows(group, all_rows, logprobs_T)])
        for group, all_rows, logprobs_T in zip(groups, rows, logprobs, strict=True)
    ]
