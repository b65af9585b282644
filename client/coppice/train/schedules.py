"""The orders in which the gradient of a group can be computed. All of them are exact."""

from typing import Any, Literal, TypeAlias, get_args

from coppice.train.groups import TrainingGroup
from coppice.train.memory import graph_fits
from coppice.train.model_info import Traits

Schedule: TypeAlias = Literal["kept", "recomputed", "injected", "packed"]
"""
kept        the prompt's forward once, its graph kept until the responses are done
recomputed  the prompt's forward again after the responses, for its graph
injected    the same, its backward begun at the model's outputs
packed      prompt and responses in one forward and one backward
"""


def choose(
    schedule: Schedule | Literal["auto"],
    config: Any,
    group: TrainingGroup,
    traits: Traits,
    *,
    given: bool,
    pass_tokens: int,
) -> Schedule:
    """ValueError where the one that is asked for cannot be."""
    if schedule != "auto":
        _check(schedule, traits, given=given)
        return schedule
    if traits.outputs_only and (given or traits.sharded):
        return "injected"
    if given:
        return "recomputed"
    if len(group.prompt) + group.num_tokens <= pass_tokens:
        return "packed"
    if traits.outputs_only:
        return "injected"
    return "kept" if graph_fits(config, len(group.prompt) - 1, traits) else "recomputed"


def _check(schedule: Schedule, traits: Traits, *, given: bool) -> None:
    if schedule not in get_args(Schedule):
        raise ValueError(f"no such schedule: {schedule}")
    if given and schedule in ("kept", "packed"):
        raise ValueError(f"schedule {schedule} computes the prompt itself; leave prompt_kv out")
    if traits.outputs_only and schedule in ("kept", "recomputed"):
        raise ValueError(
            f"schedule {schedule} begins a backward at keys and values, which a sharded model and"
            " reentrant checkpointing do not allow: take injected or packed"
        )
