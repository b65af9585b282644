"""Micro-batches of a group's responses over a prompt with known KV."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coppice.train.attention_contexts import ResponseContext
from coppice.train.distributed import max_passes_over_ranks
from coppice.train.groups import TrainingGroup
from coppice.train.hf_attention import forward
from coppice.train.micro_batches import plan_subtree_passes, response_inputs
from coppice.train.model_info import get_model_info
from coppice.train.prompt_kv import Layers
from coppice.train.rows import RowLogprobs, token_logprobs
from coppice.train.tree import max_row_tokens

# Measured on CPU: 100 tokens per micro-batch cost up to 43 % more time, 8,000 up to 32 % more.
PASS_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that are computed in one forward.

    A padding micro-batch does not contribute to the loss. It is run because other ranks of a
    sharded model need the collective calls.
    """

    rows: tuple[int, ...]
    is_padding: bool


def plan_micro_batches(model: Any, group: TrainingGroup, pass_tokens: int) -> list[MicroBatch]:
    planned = plan_subtree_passes(group, pass_tokens)
    num_idle = max_passes_over_ranks(model, len(planned)) - len(planned)
    if num_idle and not planned:
        raise ValueError("ranks that share a model need groups with at least one token")
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
    context = ResponseContext(model_info.num_layers, max_row_tokens(group), prompt, inputs.spans)
    logits_TV = forward(model, inputs, context)
    assert logits_TV is not None, "a response's forward runs to its end"
    logprobs_T = token_logprobs(logits_TV, inputs.targets, temperature)
    return select_rows(group, rows, logprobs_T)


def select_rows(group: TrainingGroup, rows: Sequence[int], logprobs_T: Tensor) -> RowLogprobs:
    lengths = tuple(group.lengths[row] for row in rows)
    return RowLogprobs(logprobs=logprobs_T, rows=tuple(rows), lengths=lengths)


def merge_rows(group: TrainingGroup, parts: Iterable[RowLogprobs]) -> RowLogprobs:
    """Logprobs of all responses in group order. `parts` may omit responses without tokens."""
    found = {row: part for rows in parts for row, part in zip(rows.rows, rows.split(), strict=True)}
    rows = tuple(range(len(group.responses)))
    ordered = [found[row] for row in rows if row in found]
    logprobs_T = torch.cat(ordered) if ordered else torch.zeros(0)
    return RowLogprobs(logprobs=logprobs_T, rows=rows, lengths=group.lengths)
