"""Recorder of the shapes of an engine's steps from its scheduler output, on CPU or GPU.

It wraps `Scheduler.schedule` of an engine in this process. A step is a decode step if all of its
samples are past prefill.
"""

from itertools import groupby
from typing import Any

from engine.cudagraphs.shape import UNEVEN, GraphShape
from engine.cudagraphs.shape_trace import Trace


class ShapeRecorder:
    """Shapes of the steps scheduled since `attach`."""

    def __init__(self) -> None:
        self._shapes: list[GraphShape] = []

    def attach(self, scheduler: Any) -> None:
        schedule = scheduler.schedule

        def recorded(*args: Any, **named: Any) -> Any:
            output = schedule(*args, **named)
            self.record_step(output, scheduler.requests)
            return output

        scheduler.schedule = recorded

    def record_step(self, output: Any, requests: Any) -> None:
        """Record a step.

        `output` is vLLM's SchedulerOutput; `requests` are the scheduler's, already advanced by the
        step.
        """
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            return
        drafts = output.scheduled_spec_decode_tokens
        decoding = all(
            number - len(drafts.get(name, ())) == 1 and _past_prompt(requests[name], number)
            for name, number in scheduled.items()
        )
        self._shapes.append(_shape(list(scheduled.values()), decoding))

    def trace(self, **about: Any) -> Trace:
        runs = tuple((shape, len(list(like))) for shape, like in groupby(self._shapes))
        return Trace(runs, about)


def _past_prompt(request: Any, scheduled: int) -> bool:
    return bool(request.num_computed_tokens - scheduled >= request.num_prompt_tokens)


def _shape(tokens: list[int], decoding: bool) -> GraphShape:
    if not decoding:
        return GraphShape(sum(tokens), None)
    return GraphShape(sum(tokens), tokens[0] if len(set(tokens)) == 1 else UNEVEN)
