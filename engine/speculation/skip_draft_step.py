"""Steps at whose end nobody drafts, taken as by a runner that has no draft method.

With one, vLLM's runner prepares in every step what verifying would need, asks for drafts at its
end, and hands them to the scheduler, if there are none as well: together with our own part 2.5 % of
a step of 64 rows (25M parameters, one thread). All of it hangs on `speculative_config`, which the
runner reads anew in every step (v1/worker/gpu_model_runner.py:2184, 2532, 4201, 4384). The
scheduler has no part in it: a request without drafts is scheduled like any other.

Not for models with recurrent layers: their state lies elsewhere in a step of the other kind.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from engine.runtime.guard import Feature


class Sleeper(Protocol):
    """Who drafts, told of every step before it is taken."""

    def end(self, ended: Any) -> None:
        """These requests have ended, and are about to be forgotten."""

    def wakes(self, running: int) -> bool:
        """Whether anything is asked for at the end of a step of so many rows."""

    def slept(self, running: int, seconds: float) -> None:
        """What a step took that nobody was awake in."""


class Doze:
    """Around the `execute_model` of one runner, which it owns from then on."""

    def __init__(
        self,
        runner: Any,
        sleeper: Callable[[], Sleeper | None],
        feature: Feature,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`sleeper` is None where nothing will ever be drafted."""
        self._runner = runner
        self._sleeper = sleeper
        self._clock = clock
        self._config = runner.speculative_config
        self._execute: Callable[..., Any] = runner.execute_model
        self._wakes = feature.guarded(_has_drafts)(self._wakes_by_its_sleeper)
        self._asleep_with, self._began = 0, 0.0
        runner.execute_model = self.execute_model

    def execute_model(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """`step` is the scheduler's output. Its tokens are sampled as it was begun."""
        self._runner.speculative_config = self._config if self._wakes(step) else None
        return self._execute(step, *args, **kwargs)

    def _wakes_by_its_sleeper(self, step: Any) -> bool:
        sleeper = self._sleeper()
        if sleeper is None:
            return _has_drafts(step)
        sleeper.end(step.finished_req_ids)
        running, now = len(step.num_scheduled_tokens), self._clock()
        if not running:  # nothing is computed: a look would be lost on it
            self._asleep_with = 0
            return True
        decodes = step.total_num_scheduled_tokens == running and not step.finished_req_ids
        if decodes and self._asleep_with == running:
            sleeper.slept(running, now - self._began)
        wakes = sleeper.wakes(running) or _has_drafts(step)
        self._asleep_with, self._began = 0 if wakes or not decodes else running, now
        return wakes


def can_doze(runner: Any) -> bool:
    return runner.device.type == "cpu" and not runner.model_config.is_hybrid


def _has_drafts(step: Any) -> bool:
    return bool(step.scheduled_spec_decode_tokens)
