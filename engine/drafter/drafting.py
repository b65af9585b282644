"""How much the drafter drafts, and what becomes of it: in EngineCore, around its scheduler.

vLLM's scheduler reads one draft length for the whole batch from a table over batch sizes; all of
the table is set before a step is scheduled. The drafts that a step makes are verified by the next
one, so a length is held for a few steps and only those that verify as much as they draft are timed,
from one call of the scheduler to the next: all that a step is, the host's work and the drafter's
too.

Which length is left to the controller that `siblings` has, with its cost model and its guard. It
weighs tokens one by one; here all rows are alike, so it is told of rows that are alike, and the
number that it would send is rounded to whole rows. While it sends nothing it learns nothing of the
drafter, so now and then, and while a new drafter is on trial, one token is drafted all the same.

No drafts get a sample with a seed, one that refuses them, and none goes beyond a sample's end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.drafter.acceptance import Acceptance
from engine.drafter.counts import Counted, Pairs
from engine.guard import feature
from engine.protocol import SpeculationChoice, SpeculationSkip
from engine.speculation.controller import Controller
from engine.speculation.cost import Step as CostStep
from engine.speculation.cost import StepCost
from engine.speculation.counts import SCOPES, Counts
from engine.speculation.profile import Profile
from engine.speculation.rows import skip_of

FEATURE: Final = feature("drafter")
HELD: Final = 4
"""Steps that a length is kept for at least."""
PROBED_EVERY: Final = 128
"""Lengths chosen from one probe to the next, of which there are so many in a row:"""
PROBES: Final = 2
NEW_PROBES: Final = 16
"""After the weights or the drafter changed."""
_SCOPE: Final = np.full((1, 64), SCOPES.index("drafter"), np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Drafts of as many rows, to the controller: contract Draft."""

    lengths: NDArray[np.int32]
    probability: NDArray[np.float32]


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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.longest = longest
        self.controller = controller or Controller()
        self.profile: Profile | None = None
        self.on_trial = False
        self.serving = serving
        self._weights = weights
        self._last_weights = weights()
        self._clock = clock
        self._counts = Counts()
        self._pairs = Pairs()
        self._acceptance: dict[str, Acceptance] = {}
        self._skips: dict[str, SpeculationSkip | None] = {}
        self._settled = serving
        self._length = 0
        self._is_probe = False
        self._judged = False
        self._began = 0.0
        self._held = 0
        self._drafted_before = 0
        self._probes = NEW_PROBES
        self._num_chosen = 0
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
        self._set_length(0)

    # What vLLM calls, step by step

    def _no_drafts(self) -> None:
        self._set_length(0)

    @FEATURE.guarded(_no_drafts)
    def before(self) -> None:
        now = self._clock()
        self._settle(now)
        self._began = now
        self._notice_changes()
        running = [
            r for r in self.scheduler.running if r.num_computed_tokens >= r.num_prompt_tokens
        ]
        if running:
            self._hold_or_choose(len(running), sum(r.num_tokens for r in running))

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
            and self._drafted_before == self._length
        )
        self._step = Step(
            began=self._began,
            running=len(past),
            context=sum(requests[name].num_tokens for name in past),
            verified=len(past) + drafting,
            steady=steady,
        )
        self._past_prompt, self._drafted_before, self._emitted = past, self._length, len(past)
        self._judged = False
        self._trim_placeholders(scheduled)

    @FEATURE.returning(None)
    def verified(self, num_drafted: int, num_accepted: int) -> None:
        if self.profile is not None:
            return
        known = self._known()
        if not self._judged:
            self._judged = True
            known.step()
        self._emitted += num_accepted
        drafted, accepted = np.array([num_drafted]), np.array([num_accepted])
        self._counts.verified(_SCOPE[:, :num_drafted], drafted, accepted)
        known.verified(num_drafted, num_accepted)
        self._pairs.verified(self.serving, self._weights(), num_drafted, num_accepted)

    @FEATURE.returning(None)
    def trim(self, drafts: Any) -> None:
        """vLLM's DraftTokenIds, before they are anybody's."""
        for request_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = self.scheduler.requests.get(request_id)
            if request is not None:
                del tokens[self._limit(request) :]

    def _trim_placeholders(self, scheduled: dict[str, int]) -> None:
        """Where steps are scheduled ahead, drafts are not seen here, only the room for them."""
        for request_id in scheduled:
            request = self.scheduler.requests[request_id]
            if request.spec_token_ids:
                request.spec_token_ids = request.spec_token_ids[: self._limit(request)]

    # Asked for by the service, between two steps

    def serves(self, version: str, *, on_trial: bool) -> None:
        self.serving, self.on_trial = version, on_trial

    def begin_profile(self) -> None:
        self.profile = Profile(self.longest)

    def end_profile(self) -> list[CostStep]:
        assert self.profile is not None, "begun"
        steps = self.profile.steps()
        self.controller = Controller(StepCost(steps))
        self.profile, self._held = None, 0
        return steps

    def read(self) -> Counted:
        self._counts.gain_ratio = self.controller.gain_ratio
        self._counts.cost_error_ratio = self.controller.cost.error
        return Counted(
            serving=self.serving, speculation=self._counts.read(), pairs=self._pairs.read()
        )

    # Lengths

    def _hold_or_choose(self, running: int, context: int) -> None:
        self._held -= 1
        if self._held < 0:
            self._held = HELD - 1
            self._set_length(self._chosen(running, context))
        if self.profile is None:
            self._counts.step(self._choice())

    def _choice(self) -> SpeculationChoice:
        """Where less than half a token a row was worth it, none is drafted."""
        if self._is_probe:
            return "probed"
        choice = self.controller.choice
        return "not_worth_it" if choice == "drafted" and self._length == 0 else choice

    def _chosen(self, running: int, context: int) -> int:
        self._is_probe = False
        if self.profile is not None:
            return min(self.profile.next_length(running), self.longest)
        self._num_chosen += 1
        if self._num_chosen % PROBED_EVERY == 0:
            self._probes = max(self._probes, PROBES)
        length = self._worth_it(running, context)
        if length == 0 and self.controller.choice != "checked":
            self._is_probe = self.on_trial or self._probes > 0
        if self._is_probe or length > 0:
            self._probes = max(0, self._probes - 1)
        return 1 if self._is_probe else length

    def _worth_it(self, running: int, context: int) -> int:
        if not self.controller.wants_drafts():
            return 0
        probability = self._known().probabilities()
        drafted = Alike(
            lengths=np.full(running, self.longest, np.int32),
            probability=np.tile(probability, (running, 1)),
        )
        lengths = self.controller.lengths(drafted, running=running, context=context)
        return round(float(lengths.mean()))

    def _set_length(self, length: int) -> None:
        self._length = length
        lookup = self.scheduler.dynamic_sd_lookup
        lookup[:] = [length] * len(lookup)

    def _settle(self, now: float) -> None:
        step, self._step = self._step, None
        if step is None or not step.steady or not self.scheduler.running:
            return
        measured = {"running": step.running, "context": step.context, "verified": step.verified}
        seconds = now - step.began
        if self.profile is not None:
            self.profile.observed(**measured, seconds=seconds)
        else:
            self.controller.observed(**measured, seconds=seconds, emitted=self._emitted)

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
        self.controller = type(self.controller)(self.controller.cost)
        self._probes, self._held = NEW_PROBES, 0
        self._settled, self._last_weights = settled, weights

    def _known(self) -> Acceptance:
        return self._acceptance.setdefault(self.serving, Acceptance(self.longest))

    def _limit(self, request: Any) -> int:
        """A step brings one token more than it accepts; none is wanted beyond the last."""
        if self._skip(request) is not None:
            return 0
        left = int(request.max_tokens - request.num_output_tokens) - 1
        return max(0, min(self.longest, left))

    def _skip(self, request: Any) -> SpeculationSkip | None:
        known = self._skips
        if request.request_id not in known:
            if len(known) > 2 * len(self.scheduler.requests) + 64:
                self._skips = known = {
                    name: skip for name, skip in known.items() if name in self.scheduler.requests
                }
            sampling = request.sampling_params
            skip = known[request.request_id] = skip_of(sampling.extra_args or {}, sampling)
            if skip is not None:
                self._counts.skipped(skip)
        return known[request.request_id]


def _past_prompt(request: Any, scheduled: int) -> bool:
    """The scheduler has advanced the request by what it scheduled."""
    return bool(request.num_computed_tokens - scheduled >= request.num_prompt_tokens)
