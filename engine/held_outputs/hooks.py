"""Hooks in EngineCore that hold outputs, and the method that sends those that are held."""

import functools
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from engine.held_outputs.core import HeldOutputs, Outputs
from engine.held_outputs.hold_option import FLUSH_ID

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

_ATTRIBUTE = "coppice_held_outputs"


def held_outputs(scheduler: Any) -> HeldOutputs:
    found: HeldOutputs | None = scheduler.__dict__.get(_ATTRIBUTE)
    if found is None:
        found = scheduler.__dict__[_ATTRIBUTE] = HeldOutputs(scheduler)
    return found


def coppice_flush_outputs(self: "EngineCore", flush_id: str) -> None:
    """Send all held tokens, and after them an output with the id of the flush."""
    for item in flushed(self).items():
        self.output_queue.put_nowait(item)
    end = EngineCoreOutput(request_id=FLUSH_ID + flush_id, new_token_ids=[])
    self.output_queue.put_nowait((0, EngineCoreOutputs(outputs=[end])))


def flushed(core: Any) -> Outputs:
    """All tokens that an EngineCore holds, under the version of its weights."""
    outputs = held_outputs(core.scheduler).flush_between_steps()
    _label(core, outputs)
    return outputs


def _label(core: Any, outputs: Outputs) -> None:
    for each in outputs.values():
        each.weight_version = core._weight_version


@functools.cache
def install() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    Scheduler.update_from_output = _without_slicing(Scheduler.update_from_output)
    Scheduler.make_stats = _sparing(Scheduler.make_stats)
    EngineCore._attach_weight_version = _holding(EngineCore._attach_weight_version)
    EngineCoreProc.pause_scheduler = _flushing(EngineCoreProc.pause_scheduler)


def _without_slicing(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        held_outputs(self).before_update(model_runner_output)
        return upstream(self, scheduler_output, model_runner_output)

    return update_from_output


def _sparing(upstream: Any) -> Any:
    """`Scheduler.make_stats`, whose counts of the prefix cache add up until it is called."""

    @functools.wraps(upstream)
    def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
        of_step = (*args, *kwargs.values())
        if any(stats is not None for stats in of_step) or held_outputs(self).wants_stats():
            return upstream(self, *args, **kwargs)
        return None

    return make_stats


def _holding(upstream: Any) -> Any:
    """`EngineCore._attach_weight_version`, the last that a step does to its outputs.

    A report of KV versions, which it attaches too, applies to the tokens after it.
    """

    @functools.wraps(upstream)
    def attach_weight_version(self: Any, outputs: Outputs) -> None:
        upstream(self, outputs)
        held_outputs(self.scheduler).after_step(outputs, self._weight_version)
        _label(self, outputs)

    return attach_weight_version


def _flushing(upstream: Any) -> Any:
    @functools.wraps(upstream)
    def pause_scheduler(self: Any, *args: Any, **kwargs: Any) -> Any:
        for item in flushed(self).items():
            self.output_queue.put_nowait(item)
        return upstream(self, *args, **kwargs)

    return pause_scheduler
