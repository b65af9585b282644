"""Steps without drafting, run as by a model runner that has no draft method.

With a draft method, vLLM's runner prepares verification in every step, requests drafts at its end
and passes them to the scheduler, even if there are none. Together with this project's part that
costs 2.5% of a step of 64 rows (25M parameters, one thread). All of it depends on
`speculative_config`, which the runner reads in every step (v1/worker/gpu_model_runner.py:2184,
2532, 4201, 4384). The scheduler is not affected: a request without drafts is scheduled like any
other.

Not used for models with recurrent layers: their state is laid out differently in the two kinds of
steps.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from engine.runtime.guard import Feature


class StepObserver(Protocol):
    """Interface of the drafting component that the skipper asks before every step."""

    def end(self, ended: Any) -> None:
        """Handle requests that have finished and are about to be dropped by the runner."""

    def needs_draft_step(self, running: int) -> bool:
        """Return whether a step with this many rows must end with a call for drafts."""

    def on_skipped_step(self, running: int, seconds: float) -> None:
        """Record the duration of a step in which drafting was skipped."""


class DraftStepSkipper:
    """Wrapper of one runner's `execute_model`; owns its `speculative_config` from then on."""

    def __init__(
        self,
        runner: Any,
        observer: Callable[[], StepObserver | None],
        feature: Feature,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`observer` returns None where nothing will ever be drafted."""
        self._runner = runner
        self._observer = observer
        self._clock = clock
        self._config = runner.speculative_config
        self._execute_model: Callable[..., Any] = runner.execute_model
        self._needs_draft_step = feature.guarded(_has_drafts)(self._ask_observer)
        self._skipped_running, self._began = 0, 0.0
        runner.execute_model = self.execute_model

    def execute_model(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `step`, the scheduler's output. The same config applies when it is sampled."""
        self._runner.speculative_config = self._config if self._needs_draft_step(step) else None
        return self._execute_model(step, *args, **kwargs)

    def _ask_observer(self, step: Any) -> bool:
        observer = self._observer()
        if observer is None:
            return _has_drafts(step)
        observer.end(step.finished_req_ids)
        running, now = len(step.num_scheduled_tokens), self._clock()
        if not running:  # an empty step must not use up an evaluation
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
