"""Schedules for the gradient of a group. All of them are exact."""

from typing import Any, Literal, TypeAlias, get_args

from coppice.train.groups import TrainingGroup
from coppice.train.memory import graph_fits
from coppice.train.model_info import ModelInfo

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
    """Selects the schedule. Raises ValueError if the requested one is not possible."""
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
        raise ValueError(f"no such schedule: {schedule}")
    if has_prompt_kv and schedule in ("kept", "packed"):
        raise ValueError(f"schedule {schedule} computes the prompt itself; leave prompt_kv out")
    if model_info.requires_output_backward and schedule in ("kept", "recomputed"):
        raise ValueError(
            f"schedule {schedule} begins a backward at keys and values, which a sharded model and"
            " reentrant checkpointing do not allow: take injected or packed"
        )
