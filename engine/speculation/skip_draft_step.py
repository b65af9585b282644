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


class StepObserver(Protocol):
    """Who drafts, told of every step before it is taken."""

    def end(self, ended: Any) -> None:
        """These requests have ended, and are about to be forgotten."""

    def needs_draft_step(self, running: int) -> bool:
        """Whether anything is asked for at the end of a step of so many rows."""

    def on_skipped_step(self, running: int, seconds: float) -> None:
        """What a step took that nobody was awake in."""


class DraftStepSkipper:
    """Around the `execute_model` of one runner, which it owns from then on."""

    def __init__(
        self,
        runner: Any,
        observer: Callable[[], StepObserver | None],
        feature: Feature,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`observer` is None where nothing will ever be drafted."""
        self._runner = runner
        self._observer = observer
        self._clock = clock
        self._config = runner.speculative_config
        self._execute_model: Callable[..., Any] = runner.execute_model
        self._needs_draft_step = feature.guarded(_has_drafts)(self._ask_observer)
        self._skipped_running, self._began = 0, 0.0
        runner.execute_model = self.execute_model

    def execute_model(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """`step` is the scheduler's output. Its tokens are sampled as it was begun."""
        self._runner.speculative_config = self._config if self._needs_draft_step(step) else None
        return self._execute_model(step, *args, **kwargs)

    def _ask_observer(self, step: Any) -> bool:
        observer = self._observer()
        if observer is None:
            return _has_drafts(step)
        observer.end(step.finished_req_ids)
        running, now = len(step.num_scheduled_tokens), self._clock()
        if not running:  # nothing is computed: a look would be lost on it
            self._skipped_running = 0
            return True
        decodes = step.total_num_scheduled_tokens == running and not step.finished_req_ids
        if decodes and self._skipped_running == running:
            observer.on_skipped_step(running, now - self._began)
        needs_draft_step = observer.needs_draft_step(running) or _has_drafts(step)
        self._skipped_running, self._began = 0 if needs_draft_step or not decodes else running, now
        return needs_draft_step


def can_skip_draft_step(runner: Any) -> bool:
    return runner.device.type == "cpu" and not runner.model_config.is_hybrid


def _has_drafts(step: Any) -> bool:
    return bool(step.scheduled_spec_decode_tokens)
