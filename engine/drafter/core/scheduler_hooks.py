"""Hooks in vLLM's scheduler (EngineCore) that set the draft length and count acceptance.

vLLM's scheduler reads one draft length for the whole batch from a table over batch sizes; every
entry of the table is set before a step is scheduled. The drafts made in a step are verified in the
next, so only steps that verify as many tokens as they draft are timed. The time runs from one
scheduler call to the next and includes the host's work and the drafter's. With asynchronous
scheduling it is the time of the step before, so the length must have been the same for one step
more.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from engine.drafter.acceptance_by_version import PairCounters, Snapshot
from engine.drafter.core.draft_length import Acceptance, BatchState, DraftLengthPolicy, DraftLimits
from engine.runtime.feature_guard import feature
from engine.speculation.controller import Controller
from engine.speculation.counters import SCOPES, Counters
from engine.speculation.counters import Snapshot as SpeculationSnapshot

FEATURE: Final = feature("drafter")
_SCOPE: Final = np.full((1, 64), SCOPES.index("drafter"), np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Engine step in progress, with the quantities that its time depends on.

    `is_timeable`: all rows decode, in the previous step too, and the step drafts as many tokens as
    it verifies. The time of other steps is not used.
    """

    began: float
    running: int
    context: int
    verified: int
    is_timeable: bool


class DraftingHooks:
    """Hooks that set the draft length and count the acceptance of this EngineCore's scheduler.

    `attach` wraps the scheduler's methods.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        max_draft_tokens: int,
        serving: str,
        weights: Callable[[], str],
        controller: Controller | None = None,
        max_samples: Mapping[int, int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.max_draft_tokens = max_draft_tokens
        self.length = DraftLengthPolicy(max_draft_tokens, controller or Controller(), max_samples)
        self.on_trial = False
        self.serving = serving
        self._weights = weights
        self._last_weights = weights()
        self._clock = clock
        self._counts = Counters()
        self._pairs = PairCounters()
        num_equal = 2 if scheduler.scheduler_config.async_scheduling else 1
        self._limits = DraftLimits(
            scheduler.requests, max_draft_tokens, self._counts.record_skipped
        )
        self._acceptance: dict[str, Acceptance] = {}
        self._settled_drafter = serving
        self._verified_drafter = self._current_drafter = serving
        self._tokens = 0
        self._is_step_counted = False
        self._step_start = 0.0
        self._lengths: deque[int] = deque([0] * num_equal, maxlen=num_equal)
        self._num_emitted = 0
        self._step: Step | None = None
        self._past_prompt: set[str] = set()

    def attach(self) -> None:
        schedule, stats = self.scheduler.schedule, self.scheduler.make_spec_decoding_stats
        update = self.scheduler.update_draft_token_ids

        def scheduled(*args: Any, **named: Any) -> Any:
            self.before_schedule()
            output = schedule(*args, **named)
            self.after_schedule(output)
            return output

        def patched_make_stats(spec_stats: Any, **named: Any) -> Any:
            self.record_verified(named["num_draft_tokens"], named["num_accepted_tokens"])
            return stats(spec_stats, **named)

        def patched_update_drafts(drafts: Any) -> None:
            self.trim_drafts(drafts)
            update(drafts)

        self.scheduler.schedule = scheduled
        self.scheduler.make_spec_decoding_stats = patched_make_stats
        self.scheduler.update_draft_token_ids = patched_update_drafts
        self._set_draft_length(0)

    # Called by vLLM in every step.

    def _no_drafts(self) -> None:
        self._set_draft_length(0)

    @FEATURE.guarded(_no_drafts)
    def before_schedule(self) -> None:
        now = self._clock()
        self._record_last_step(now)
        self._step_start = now
        self._verified_drafter, self._current_drafter = self._current_drafter, self.serving
        self._detect_changes()
        running = [
            r for r in self.scheduler.running if r.num_computed_tokens >= r.num_prompt_tokens
        ]
        if running:
            self._set_draft_length(self.length.at(self._batch_state(running)))
            if self.length.profile is None:
                self._counts.record_step(self.length.decision())

    @FEATURE.guarded_with_default(None)
    def after_schedule(self, output: Any) -> None:
        """Record the scheduled step; `output` is vLLM's SchedulerOutput."""
        scheduled = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        requests = self.scheduler.requests
        decoding = {name for name in scheduled if _past_prompt(requests[name], scheduled[name])}
        drafting = sum(len(drafts.get(name, ())) for name in decoding)
        is_timeable = (
            bool(decoding)
            and decoding == scheduled.keys()
            and decoding <= self._past_prompt
            and set(self._lengths) == {self._tokens}
        )
        self._step = Step(
            began=self._step_start,
            running=len(decoding),
            context=sum(requests[name].num_tokens for name in decoding),
            verified=len(decoding) + drafting,
            is_timeable=is_timeable,
        )
        self._past_prompt, self._num_emitted = decoding, len(decoding)
        self._lengths.append(self._tokens)
        self._is_step_counted = False
        self._trim_placeholders(scheduled)

    @FEATURE.guarded_with_default(None)
    def record_verified(self, num_drafted: int, num_accepted: int) -> None:
        if self.length.profile is not None:
            return
        self._num_emitted += num_accepted
        drafted, accepted = np.array([num_drafted]), np.array([num_accepted])
        self._counts.record_verified(_SCOPE[:, :num_drafted], drafted, accepted)
        self._pairs.record_verified(
            self._verified_drafter, self._weights(), num_drafted, num_accepted
        )
        acceptance = self._acceptance.get(self._verified_drafter)
        if acceptance is None:
            return  # an earlier drafter, whose A/B test is over
        if not self._is_step_counted:
            self._is_step_counted = True
            acceptance.decay()
        acceptance.record_verified(num_drafted, num_accepted)

    @FEATURE.guarded_with_default(None)
    def trim_drafts(self, drafts: Any) -> None:
        """Shorten the drafts in vLLM's DraftTokenIds to the limit of each request."""
        for request_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = self.scheduler.requests.get(request_id)
            if request is not None:
                del tokens[self._limits.limit(request) :]

    def _trim_placeholders(self, scheduled: dict[str, int]) -> None:
        """Shorten the draft placeholders of each scheduled request to its limit.

        With asynchronous scheduling only placeholders are visible here, not the drafts.
        """
        for request_id in scheduled:
            request = self.scheduler.requests[request_id]
            if request.spec_token_ids:
                request.spec_token_ids = request.spec_token_ids[: self._limits.limit(request)]

    # Called by the service, between two steps.

    def set_drafter(self, version: str, *, on_trial: bool) -> None:
        self.serving, self.on_trial = version, on_trial

    def read(self) -> Snapshot:
        return Snapshot(serving=self.serving, pairs=self._pairs.read())

    def speculation(self) -> SpeculationSnapshot:
        """Counters of all drafts, whatever model has made them."""
        controller = self.length.controller
        self._counts.gain_ratio = controller.gain_ratio
        self._counts.cost_error_ratio = controller.cost.error
        return self._counts.read()

    def _batch_state(self, running: list[Any]) -> BatchState:
        return BatchState(
            running=len(running),
            context=sum(request.num_tokens for request in running),
            probability=self._current_acceptance().probabilities(),
            on_trial=self.on_trial,
        )

    def _set_draft_length(self, tokens: int) -> None:
        self._tokens = tokens
        lookup = self.scheduler.dynamic_sd_lookup
        lookup[:] = [tokens] * len(lookup)

    def _record_last_step(self, now: float) -> None:
        step, self._step = self._step, None
        if step is not None and step.is_timeable and self.scheduler.running:
            self.length.record_step(
                running=step.running,
                context=step.context,
                verified=step.verified,
                seconds=now - step.began,
                emitted=self._num_emitted,
            )

    # Changes of weights and drafter.

    def _detect_changes(self) -> None:
        """Reset the draft-length policy if the weights or, outside A/B tests, the drafter changed.

        Measurements of the previous weights and drafter, including the duration of pauses, are only
        a prior for the new ones.
        """
        weights = self._weights()
        settled_drafter = self._settled_drafter if self.on_trial else self.serving
        if (settled_drafter, weights) == (self._settled_drafter, self._last_weights):
            return
        if weights != self._last_weights:
            self._counts.on_weights_changed()
            for acceptance in self._acceptance.values():
                acceptance.on_weights_changed()
        self._acceptance = {
            settled_drafter: self._acceptance.get(
                settled_drafter, Acceptance(self.max_draft_tokens)
            )
        }
        self.length.reset()
        self._settled_drafter, self._last_weights = settled_drafter, weights

    def _current_acceptance(self) -> Acceptance:
        return self._acceptance.setdefault(self.serving, Acceptance(self.max_draft_tokens))


def _past_prompt(request: Any, scheduled: int) -> bool:
    """Return whether the request was past prefill before this step.

    The scheduler has already advanced it by the scheduled tokens.
    """
    return bool(request.num_computed_tokens - scheduled >= request.num_prompt_tokens)
