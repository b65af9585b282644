"""What the drafter is made to draft, and what becomes of it: in EngineCore, around its scheduler.

vLLM's scheduler reads one draft length for the whole batch from a table over batch sizes; all of
the table is set before a step is scheduled. The drafts that a step makes are verified by the next
one, so only those that verify as much as they draft are timed, from one call of the scheduler to
the next: all that a step is, the host's work and the drafter's too.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from engine.drafter.core.acceptance import Acceptance
from engine.drafter.core.draft_length import Asked, Length
from engine.drafter.core.draft_limits import Wanted
from engine.drafter.counters import Counted, Pairs
from engine.runtime.guard import feature
from engine.speculation.controller import Controller
from engine.speculation.cost import Step as CostStep
from engine.speculation.counters import SCOPES, Counts

FEATURE: Final = feature("drafter")
_SCOPE: Final = np.full((1, 64), SCOPES.index("drafter"), np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One that is under way; it can be timed if it only decodes, as much as it drafts."""

    began: float
    running: int
    context: int
    verified: int
    steady: bool


class Drafting:
    """`attach` puts it around a scheduler, of which there is one for the life of a process."""

    def __init__(
        self,
        scheduler: Any,
        *,
        longest: int,
        serving: str,
        weights: Callable[[], str],
        controller: Controller | None = None,
        most_samples: Mapping[int, int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.longest = longest
        self.length = Length(longest, controller or Controller(), most_samples)
        self.on_trial = False
        self.serving = serving
        self._weights = weights
        self._last_weights = weights()
        self._clock = clock
        self._counts = Counts()
        self._pairs = Pairs()
        self._wanted = Wanted(scheduler.requests, longest, self._counts.skipped)
        self._acceptance: dict[str, Acceptance] = {}
        self._settled = serving
        self._verifying = self._drafting_by = serving
        self._tokens = 0
        self._judged = False
        self._began = 0.0
        self._drafted_before = 0
        self._emitted = 0
        self._step: Step | None = None
        self._past_prompt: set[str] = set()

    def attach(self) -> None:
        schedule, stats = self.scheduler.schedule, self.scheduler.make_spec_decoding_stats
        update = self.scheduler.update_draft_token_ids

        def scheduled(*args: Any, **named: Any) -> Any:
            self.before()
            output = schedule(*args, **named)
            self.after(output)
            return output

        def counted(spec_stats: Any, **named: Any) -> Any:
            self.verified(named["num_draft_tokens"], named["num_accepted_tokens"])
            return stats(spec_stats, **named)

        def updated(drafts: Any) -> None:
            self.trim(drafts)
            update(drafts)

        self.scheduler.schedule = scheduled
        self.scheduler.make_spec_decoding_stats = counted
        self.scheduler.update_draft_token_ids = updated
        self._draft(0)

    # What vLLM calls, step by step

    def _no_drafts(self) -> None:
        self._draft(0)

    @FEATURE.guarded(_no_drafts)
    def before(self) -> None:
        now = self._clock()
        self._settle(now)
        self._began = now
        self._verifying, self._drafting_by = self._drafting_by, self.serving
        self._notice_changes()
        running = [
            r for r in self.scheduler.running if r.num_computed_tokens >= r.num_prompt_tokens
        ]
        if running:
            self._draft(self.length.at(self._asked(running)))
            if self.length.profile is None:
                self._counts.step(self.length.choice())

    @FEATURE.returning(None)
    def after(self, output: Any) -> None:
        """`output`: vLLM's SchedulerOutput."""
        scheduled = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        requests = self.scheduler.requests
        past = {name for name in scheduled if _past_prompt(requests[name], scheduled[name])}
        drafting = sum(len(drafts.get(name, ())) for name in past)
        steady = (
            bool(past)
            and past == scheduled.keys()
            and past <= self._past_prompt
            and self._drafted_before == self._tokens
        )
        self._step = Step(
            began=self._began,
            running=len(past),
            context=sum(requests[name].num_tokens for name in past),
            verified=len(past) + drafting,
            steady=steady,
        )
        self._past_prompt, self._drafted_before, self._emitted = past, self._tokens, len(past)
        self._judged = False
        self._trim_placeholders(scheduled)

    @FEATURE.returning(None)
    def verified(self, num_drafted: int, num_accepted: int) -> None:
        if self.length.profile is not None:
            return
        self._emitted += num_accepted
        drafted, accepted = np.array([num_drafted]), np.array([num_accepted])
        self._counts.verified(_SCOPE[:, :num_drafted], drafted, accepted)
        self._pairs.verified(self._verifying, self._weights(), num_drafted, num_accepted)
        known = self._acceptance.get(self._verifying)
        if known is None:
            return  # of the one before, whose trial is over
        if not self._judged:
            self._judged = True
            known.step()
        known.verified(num_drafted, num_accepted)

    @FEATURE.returning(None)
    def trim(self, drafts: Any) -> None:
        """vLLM's DraftTokenIds, before they are anybody's."""
        for request_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = self.scheduler.requests.get(request_id)
            if request is not None:
                del tokens[self._wanted.limit(request) :]

    def _trim_placeholders(self, scheduled: dict[str, int]) -> None:
        """Where steps are scheduled ahead, drafts are not seen here, only the room for them."""
        for request_id in scheduled:
            request = self.scheduler.requests[request_id]
            if request.spec_token_ids:
                request.spec_token_ids = request.spec_token_ids[: self._wanted.limit(request)]

    # Asked for by the service, between two steps

    def serves(self, version: str, *, on_trial: bool) -> None:
        self.serving, self.on_trial = version, on_trial

    def begin_profile(self) -> None:
        self.length.begin_profile()

    def end_profile(self) -> list[CostStep]:
        return self.length.end_profile()

    def read(self) -> Counted:
        controller = self.length.controller
        self._counts.gain_ratio = controller.gain_ratio
        self._counts.cost_error_ratio = controller.cost.error
        return Counted(
            serving=self.serving, speculation=self._counts.read(), pairs=self._pairs.read()
        )

    def _asked(self, running: list[Any]) -> Asked:
        return Asked(
            running=len(running),
            context=sum(request.num_tokens for request in running),
            probability=self._known().probabilities(),
            on_trial=self.on_trial,
        )

    def _draft(self, tokens: int) -> None:
        self._tokens = tokens
        lookup = self.scheduler.dynamic_sd_lookup
        lookup[:] = [tokens] * len(lookup)

    def _settle(self, now: float) -> None:
        step, self._step = self._step, None
        if step is not None and step.steady and self.scheduler.running:
            self.length.observed(
                running=step.running,
                context=step.context,
                verified=step.verified,
                seconds=now - step.began,
                emitted=self._emitted,
            )

    # Who drafts for whom

    def _notice_changes(self) -> None:
        """Other weights, or a drafter that has stood its trial: what was found out of the ones
        before, and how long their drafts were to rest, is no more than a guess at these.
        """
        weights = self._weights()
        settled = self._settled if self.on_trial else self.serving
        if (settled, weights) == (self._settled, self._last_weights):
            return
        if weights != self._last_weights:
            self._counts.weights_changed()
            for known in self._acceptance.values():
                known.weights_changed()
        self._acceptance = {settled: self._acceptance.get(settled, Acceptance(self.longest))}
        self.length.begin_anew()
        self._settled, self._last_weights = settled, weights

    def _known(self) -> Acceptance:
        return self._acceptance.setdefault(self.serving, Acceptance(self.longest))


def _past_prompt(request: Any, scheduled: int) -> bool:
    """The scheduler has advanced the request by what it scheduled."""
    return bool(request.num_computed_tokens - scheduled >= request.num_prompt_tokens)
