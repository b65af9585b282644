"""The passes of a group's responses over a prompt that is computed already."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coppice.train.contexts import ResponseContext
from coppice.train.groups import TrainingGroup
from coppice.train.interface import forward
from coppice.train.passes import plan_passes, response_inputs
from coppice.train.prompt_kv import Layers
from coppice.train.ranks import most_passes
from coppice.train.rows import RowLogprobs, token_logprobs
from coppice.train.traits import traits_of

# Measured on CPU: passes of 100 tokens cost up to 43 % more, of 8,000 up to 32 % more.
PASS_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Rows computed together. An idle one counts for nothing: another rank needs the call."""

    rows: tuple[int, ...]
    idle: bool


def passes_of(model: Any, group: TrainingGroup, pass_tokens: int) -> list[Pass]:
    planned = plan_passes(group.lengths, pass_tokens)
    num_idle = most_passes(model, len(planned)) - len(planned)
    if num_idle and not planned:
        raise ValueError("ranks that share a model need groups with at least one token")
    return [
        *(Pass(rows=rows, idle=False) for rows in planned),
        *(Pass(rows=planned[0][:1], idle=True) for _ in range(num_idle)),
    ]


def response_logprobs(
    model: Any,
    group: TrainingGroup,
    rows: Sequence[int],
    prompt: Layers,
    temperature: float,
) -> RowLogprobs:
    traits = traits_of(model)
    lengths = tuple(group.lengths[row] for row in rows)
    inputs = response_inputs(group, rows, traits.device)
    context = ResponseContext(traits.num_layers, longest(group), prompt, lengths)
    logits_TV = forward(model, inputs, context)
    assert logits_TV is not None, "a response's forward runs to its end"
    logprobs_T = token_logprobs(logits_TV, inputs.targets, temperature)
    return RowLogprobs(logprobs=logprobs_T, rows=tuple(rows), lengths=lengths)


def longest(group: TrainingGroup) -> int:
    """Tokens of the longest row, prompt included."""
    return len(group.prompt) + max(group.lengths)


def whole(group: TrainingGroup, logprobs_T: Tensor) -> RowLogprobs:
    """Of all responses, in their order."""
    rows = tuple(range(len(group.responses)))
    return RowLogprobs(logprobs=logprobs_T, rows=rows, lengths=group.lengths)
