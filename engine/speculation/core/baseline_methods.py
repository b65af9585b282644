"""Methods added to vLLM's EngineCore that measure step times without speculation."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.speculation.baseline import baseline_cache, predict_gain, profile_cache
from engine.speculation.cost import Profile, ProfileCache, Step

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

Batch = tuple[int, int]
"""Number of rows, and their context in tokens."""


class StepTimer:
    """Times of the decode steps of a scheduler, of which none drafts.

    The time runs from one scheduler call to the next. With asynchronous scheduling that is the time
    of the step before, so a step is timed only if the two before it had the same rows.
    """

    def __init__(self, scheduler: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._profile = Profile(max_draft_tokens=0)
        self._began = 0.0
        self._rows: list[frozenset[str]] = []
        self._batch: Batch | None = None

    def attach(self) -> None:
        self._schedule = self._scheduler.schedule
        lookup = self._scheduler.dynamic_sd_lookup
        self._lookup = None if lookup is None else list(lookup)
        if lookup is not None:
            lookup[:] = [0] * len(lookup)
        self._scheduler.schedule = self._timed

    def detach(self) -> list[Step]:
        """Restore the scheduler; returns the measured steps."""
        self._scheduler.schedule = self._schedule
        if self._lookup is not None:
            self._scheduler.dynamic_sd_lookup[:] = self._lookup
        return self._profile.steps()

    def _timed(self, *args: Any, **named: Any) -> Any:
        now = self._clock()
        if self._batch is not None:
            running, context = self._batch
            self._profile.record_step(
                running=running, context=context, verified=running, seconds=now - self._began
            )
        output = self._schedule(*args, **named)
        self._began, self._batch = now, self._timeable(output)
        return output

    def _timeable(self, output: Any) -> Batch | None:
        """The batch of a step, if it can be timed."""
        requests = [self._scheduler.requests[name] for name in output.num_scheduled_tokens]
        decodes = all(r.num_computed_tokens > r.num_prompt_tokens for r in requests)
        self._rows = [*self._rows[-2:], frozenset(output.num_scheduled_tokens)]
        same = len(self._rows) == 3 and len(set(self._rows)) == 1
        drafted = any(output.scheduled_spec_decode_tokens.values())
        if not requests or not decodes or not same or drafted:
            return None
        return len(requests), sum(r.num_tokens for r in requests)


def coppice_begin_baseline(self: "EngineCore", again: bool) -> bool:
    """Begin to time steps without drafts, and return whether it has begun.

    It has not if there is a baseline, unless `again`, or if this engine cannot measure one.
    """
    config = self.vllm_config
    if not again and baseline_cache(config).read() is not None:
        return False
    if config.speculative_config is not None and not config.use_v2_model_runner:
        return False
    self.coppice_step_timer = StepTimer(self.scheduler)
    self.coppice_step_timer.attach()
    return True


def coppice_finish_baseline(self: "EngineCore") -> int:
    """Cache the baseline; returns the number of batches that were measured."""
    steps = self.coppice_step_timer.detach()
    if steps:
        baseline_cache(self.vllm_config).write(steps)
    return len(steps)


def coppice_predict_gain(self: "EngineCore") -> tuple[float, float | None] | None:
    """Fields of the prediction for this engine's drafts; None if step times were not measured."""
    config = self.vllm_config
    prediction = predict_gain(
        _profile(self).read(), baseline_cache(config).read(), config.num_speculative_tokens
    )
    return None if prediction is None else (prediction.best_speedup, prediction.overhead)


def _profile(core: "EngineCore") -> ProfileCache:
    """Cached step times with the drafts of this engine, of which a draft model has its own."""
    profile: ProfileCache | None = getattr(core, "coppice_profile", None)
    return profile or profile_cache(core.vllm_config)


METHODS = (coppice_begin_baseline, coppice_finish_baseline, coppice_predict_gain)
