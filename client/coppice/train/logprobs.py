"""Logprobs of responses with one prefill per prompt, with or without a graph."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from coppice.train.attention_contexts import PackedContext
from coppice.train.distributed import is_sharded, unwrap_ddp
from coppice.train.groups import TrainingGroup
from coppice.train.hf_attention import attending, forward, is_attending
from coppice.train.micro_batches import concatenate_inputs, prompt_inputs, response_inputs
from coppice.train.model_info import get_model_info
from coppice.train.prompt_forward import compute_layers, no_grad_layers
from coppice.train.prompt_kv import PromptKV, prompt_kv_of
from coppice.train.responses import (
    PASS_TOKENS,
    merge_rows,
    plan_micro_batches,
    response_logprobs,
    select_rows,
)
from coppice.train.rows import RowLogprobs, token_logprobs
from coppice.train.tree import max_row_tokens, subtrees_of


def compute_prompt_kv(model: Any, group: TrainingGroup) -> PromptKV:
    """Computes the prompt's KV with the current weights, as a server's handle provides it."""
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
    """Logprobs of all responses, without a graph.

    A given prompt_kv must have been computed with this model's weights.
    """
    model = unwrap_ddp(model)
    if not group.num_tokens and not is_sharded(model):
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
    """Logprobs per group, with a graph: all prompts and responses in one row and one forward.

    For a model with activation checkpointing, run the backward inside attending(model), because it
    recomputes layers. Call this function inside the same scope.
    """
    model = unwrap_ddp(model)
    model_info = get_model_info(model)
    if not any(group.num_tokens for group in groups):
        raise ValueError("no response has a token")
    if model_info.checkpointed and torch.is_grad_enabled() and not is_attending(model):
        raise ValueError("checkpointed: call this, and the backward, inside attending(model)")
    rows = [tuple(chain.from_iterable(subtrees_of(group))) for group in groups]
    prompts = [prompt_inputs(group, model_info.device) for group in groups]
    responses = [
        response_inputs(group, all_rows, model_info.device)
        for group, all_rows in zip(groups, rows, strict=True)
    ]
    context = PackedContext(
        model_info.num_layers,
        max(max_row_tokens(group) for group in groups),
        [
            (len(group.prompt) - 1, inputs.spans)
            for group, inputs in zip(groups, responses, strict=True)
        ],
    )
    inputs = concatenate_inputs([*prompts, *responses])
    with attending(model):
        logits_TV = forward(model, inputs, context)
    assert logits_TV is not None, "a packed forward runs to its end"
    logprobs_T = token_logprobs(logits_TV, inputs.targets, temperature)
    parts = torch.split(logprobs_T, [group.num_tokens for group in groups])
    return [
        merge_rows(group, [select_rows(group, all_rows, part)])
        for group, all_rows, part in zip(groups, rows, parts, strict=True)
    ]
