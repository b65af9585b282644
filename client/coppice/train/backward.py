"""Backward passes for responses that share a prefilled prompt; gradients equal separate passes.

The backwards of the responses accumulate the loss gradient in the weights and in the prompt's keys
and values, which are leaves of their graphs. A backward through the prompt's forward then
propagates the latter to the weights. Without it the gradient would be wrong: by a third of its norm
on the shipped checkpoint, by more than half on untrained models.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from coppice.train.attention.huggingface_models import attending
from coppice.train.backward_memory import ModelInfo, get_model_info, graph_fits
from coppice.train.data_parallel import loss_scale, no_gradient_sync, unwrap_ddp
from coppice.train.group_logprobs import (
    PASS_TOKENS,
    compute_layers,
    inject,
    no_grad_layers,
    packed_logprobs,
    plan_micro_batches,
    response_logprobs,
)
from coppice.train.prompt_kv_leaves import (
    Layers,
    PromptKV,
    backward_through,
    leaves_of,
    relative_error,
)
from coppice.train.training_group import LossFunction, TrainingGroup

Schedule: TypeAlias = Literal["kept", "recomputed", "injected", "packed"]
"""Order of forwards and backwards.

kept        one prompt forward, whose graph is kept until the responses are done
recomputed  a second prompt forward after the responses, to build the graph
injected    like recomputed, but the backward starts at the model's outputs
packed      prompt and responses in one forward and one backward
"""


def choose(
    schedule: Schedule | Literal["auto"],
    config: Any,
    group: TrainingGroup,
    model_info: ModelInfo,
    *,
    has_prompt_kv: bool,
    pass_tokens: int,
) -> Schedule:
    """Selects the schedule of forwards and backwards. Raises ValueError if it is impossible."""
    if schedule != "auto":
        _check(schedule, model_info, has_prompt_kv=has_prompt_kv)
        return schedule
    if model_info.requires_output_backward and (has_prompt_kv or model_info.sharded):
        return "injected"
    if has_prompt_kv:
        return "recomputed"
    if len(group.prompt) + group.num_tokens <= pass_tokens:
        return "packed"
    if model_info.requires_output_backward:
        return "injected"
    return "kept" if graph_fits(config, len(group.prompt) - 1, model_info) else "recomputed"


def _check(schedule: Schedule, model_info: ModelInfo, *, has_prompt_kv: bool) -> None:
    if schedule not in get_args(Schedule):
        raise ValueError(f"unknown schedule: {schedule}")
    if has_prompt_kv and schedule in ("kept", "packed"):
        raise ValueError(f"schedule {schedule} computes the prompt itself: omit prompt_kv")
    if model_info.requires_output_backward and schedule in ("kept", "recomputed"):
        raise ValueError(
            f"schedule {schedule} starts a backward at keys and values, which sharded models and"
            " reentrant checkpointing do not support: use injected or packed"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardReport:
    """Statistics of one grouped_backward call.

    prompt_kv_error is the relative L2 error of the given prompt_kv against the KV computed for the
    gradient: rounding, or another weights version. It is None if no prompt_kv was given.
    """

    loss: float
    schedule: Schedule
    num_passes: int
    num_prompt_forwards: int
    prompt_kv_error: float | None = None


def grouped_backward(
    model: Any,
    group: TrainingGroup,
    loss_fn: LossFunction,
    *,
    prompt_kv: PromptKV | None = None,
    pass_tokens: int = PASS_TOKENS,
    schedule: Schedule | Literal["auto"] = "auto",
    temperature: float = 1.0,
) -> BackwardReport:
    """Accumulates the gradient of a group's loss in the weights, as loss.backward() does.

    Args:
        model: Hugging Face causal LM, possibly wrapped by DDP or sharded by FSDP2.
        group: the prompt and its responses, or a TrainingTree.
        loss_fn: called once per micro-batch. The losses are summed, so its normalizers must be
            fixed beforehand.
        prompt_kv: KV of the prompt, if it was fetched from the server.
        pass_tokens: maximum number of response tokens per micro-batch.
        schedule: order of forwards and backwards, see Schedule.
        temperature: sampling temperature of the responses.

    Under DDP and FSDP2, call reduce_gradients(model) after the last call of a step.
    """
    model = unwrap_ddp(model)
    model_info = get_model_info(model)
    chosen = choose(
        schedule,
        model.config,
        group,
        model_info,
        has_prompt_kv=prompt_kv is not None,
        pass_tokens=pass_tokens,
    )
    if not group.num_targets and not model_info.sharded:
        return BackwardReport(loss=0.0, schedule=chosen, num_passes=0, num_prompt_forwards=0)
    step = _Step(model, group, loss_fn, prompt_kv, pass_tokens, temperature, loss_scale(model))
    # Also during the backwards, which recompute checkpointed layers.
    with attending(model), no_gradient_sync(model):
        return _SCHEDULES[chosen](step)


@dataclass(frozen=True, slots=True)
class _Step:
    model: Any
    group: TrainingGroup
    loss_fn: LossFunction
    prompt_kv: PromptKV | None
    pass_tokens: int
    temperature: float
    loss_scale: int

    def backward(self, loss: Tensor) -> None:
        (loss * self.loss_scale).backward()  # type: ignore[no-untyped-call]


def _kept(step: _Step) -> BackwardReport:
    made = compute_layers(step.model, step.group)
    leaves = leaves_of(made)
    loss, num_passes = _responses(step, leaves)
    backward_through(made, leaves)
    return BackwardReport(
        loss=loss, schedule="kept", num_passes=num_passes, num_prompt_forwards=1 if made else 0
    )


def _recomputed(step: _Step) -> BackwardReport:
    def backward(leaves: Layers) -> Layers:
        made = compute_layers(step.model, step.group)
        backward_through(made, leaves)
        return made

    return _two_phases(step, "recomputed", backward)


def _injected(step: _Step) -> BackwardReport:
    return _two_phases(step, "injected", lambda leaves: inject(step.model, step.group, leaves))


def _two_phases(
    step: _Step, schedule: Schedule, backward: Callable[[Layers], Layers]
) -> BackwardReport:
    has_prompt_kv = step.prompt_kv is not None
    leaves = leaves_of(no_grad_layers(step.model, step.group, step.prompt_kv))
    loss, num_passes = _responses(step, leaves)
    made = backward(leaves)
    return BackwardReport(
        loss=loss,
        schedule=schedule,
        num_passes=num_passes,
        num_prompt_forwards=0 if not made else 1 if has_prompt_kv else 2,
        prompt_kv_error=relative_error(leaves, made) if has_prompt_kv else None,
    )


def _packed(step: _Step) -> BackwardReport:
    [rows] = packed_logprobs(step.model, [step.group], temperature=step.temperature)
    loss = step.loss_fn(rows)
    step.backward(loss)
    return BackwardReport(loss=loss.item(), schedule="packed", num_passes=1, num_prompt_forwards=1)


def _responses(step: _Step, prompt: Layers) -> tuple[float, int]:
    """Runs forward and backward of all micro-batches; returns the loss and their number.

    The gradient accumulates in the weights and in `prompt`, the detached KV of the prompt.
    """
    total = torch.zeros(())
    passes = plan_micro_batches(step.model, step.group, step.pass_tokens)
    for each in passes:
        rows = response_logprobs(step.model, step.group, each.rows, prompt, step.temperature)
        loss = rows.logprobs.sum() * 0.0 if each.is_padding else step.loss_fn(rows)
        step.backward(loss)
        total = total + loss.detach()
    return total.item(), sum(not each.is_padding for each in passes)


_SCHEDULES: dict[Schedule, Callable[[_Step], BackwardReport]] = {
    "kept": _kept,
    "recomputed": _recomputed,
    "injected": _injected,
    "packed": _packed,
}
