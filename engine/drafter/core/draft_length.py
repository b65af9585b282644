"""Policy for the draft length of a whole batch, from measured acceptance and step times.

The choice is made by the speculation `Controller` of mode `siblings`, with its cost model and its
limits on losses. The controller considers single tokens of single rows; here it receives identical
rows, and the number of tokens it would send is rounded to whole rows. Without drafts nothing is
learned about the drafter, so occasionally, and while a new drafter is in an A/B test, one token is
drafted anyway (a probe).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.speculation.controller import Controller
from engine.speculation.cost import Profile
from engine.speculation.request_table import find_skip_reason
from engine.types.feature_stats import SpeculationDecision, SpeculationSkipReason

STEP_DECAY: Final = 0.99
"""Factor by which the weight of a step decays with each later step."""
PRIOR_RATE: Final = 0.5
PRIOR_WEIGHT: Final = 4.0
"""Weight of the prior, in drafted tokens."""
WEIGHTS_CHANGED_DECAY: Final = 0.05


class Acceptance:
    """Acceptance rates of a drafter's tokens by position in the draft.

    A rate is conditional: the probability that a token is accepted given that all before it were,
    since only then is it verified. Counts decay with every step that drafts. A position that no
    draft has reached is assumed to have the rate of the last one reached.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._num_tried = np.zeros(max_draft_tokens)
        self._num_accepted = np.zeros(max_draft_tokens)

    def decay(self) -> None:
        """Reduce the weight of earlier steps; called once per step that drafts."""
        self._num_tried *= STEP_DECAY
        self._num_accepted *= STEP_DECAY

    def record_verified(self, num_drafted: int, num_accepted: int) -> None:
        """Record the outcome of one draft; tokens after the first rejected one are not observed."""
        self._num_tried[: min(num_accepted + 1, num_drafted)] += 1
        self._num_accepted[:num_accepted] += 1

    def on_weights_changed(self) -> None:
        """Reduce the acceptance counts of earlier weights to a weak prior."""
        self._num_tried *= WEIGHTS_CHANGED_DECAY
        self._num_accepted *= WEIGHTS_CHANGED_DECAY

    def probabilities(self) -> NDArray[np.float32]:
        """Conditional acceptance probability per draft position, [max_draft_tokens]."""
        rates = np.empty(len(self._num_tried), np.float32)
        prior = PRIOR_RATE
        for position, num_tried in enumerate(self._num_tried):
            prior = (self._num_accepted[position] + PRIOR_WEIGHT * prior) / (
                num_tried + PRIOR_WEIGHT
            )
            rates[position] = prior
        return rates


class DraftLimits:
    """Maximum draft lengths of the scheduler's requests.

    Samples with a seed and samples that opt out get no drafts, and no draft extends past a sample's
    end. `skipped` is called once for each request that gets no drafts.
    """

    def __init__(
        self,
        requests: dict[str, Any],
        max_draft_tokens: int,
        skipped: Callable[[SpeculationSkipReason], None],
    ) -> None:
        self._requests = requests
        self._max_draft_tokens = max_draft_tokens
        self._on_skip = skipped
        self._skip_reasons: dict[str, SpeculationSkipReason | None] = {}

    def limit(self, request: Any) -> int:
        """Maximum draft length of a request, less than the number of tokens it may still generate.

        A step yields one token more than it accepts.
        """
        if self._skip_reason(request) is not None:
            return 0
        left = int(request.max_tokens - request.num_output_tokens) - 1
        return max(0, min(self._max_draft_tokens, left))

    def _skip_reason(self, request: Any) -> SpeculationSkipReason | None:
        if request.request_id not in self._skip_reasons:
            self._remove_finished()
            sampling = request.sampling_params
            skip = self._skip_reasons[request.request_id] = find_skip_reason(
                sampling.extra_args or {}, sampling
            )
            if skip is not None:
                self._on_skip(skip)
        return self._skip_reasons[request.request_id]

    def _remove_finished(self) -> None:
        if len(self._skip_reasons) > 2 * len(self._requests) + 64:
            self._skip_reasons = {
                name: skip for name, skip in self._skip_reasons.items() if name in self._requests
            }


HOLD_STEPS: Final = 4
"""Minimum number of steps for which a draft length is kept."""
PROBE_INTERVAL: Final = 128
"""Number of choices of a draft length between two bursts of PROBE_BURST probes."""
PROBE_BURST: Final = 2
INITIAL_PROBES: Final = 16
"""Number of probes after a change of the weights or the drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformDrafts:
    """Drafts of a batch of identical rows; implements the controller's `Draft` protocol."""

    lengths: NDArray[np.int32]
    probability: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """State of a decode batch on which the choice of its draft length depends.

    `running` is the number of rows and `context` their total context in tokens. `probability` is
    the acceptance probability per draft position; `on_trial` is true while the drafter is in an A/B
    test.
    """

    running: int
    context: int
    probability: NDArray[np.float32]
    on_trial: bool


class DraftLengthPolicy:
    """Chooses the draft length of each step.

    `controller` is replaced whenever the weights or the drafter change. `max_samples` maps each
    length that has CUDA graphs to the number of samples they have room for; no other length is
    chosen.
    """

    def __init__(
        self,
        max_draft_tokens: int,
        controller: Controller,
        max_samples: Mapping[int, int] | None = None,
    ) -> None:
        self.controller = controller
        self.profile: Profile | None = None
        self._max_draft_tokens = max_draft_tokens
        self._max_samples = max_samples
        self._tokens = 0
        self._is_probe = False
        self._hold_steps = 0
        self._probes = INITIAL_PROBES
        self._num_choices = 0

    def at(self, batch: BatchState) -> int:
        """Draft length of the next step."""
        self._hold_steps -= 1
        if self._hold_steps < 0:
            self._hold_steps = HOLD_STEPS - 1
            self._tokens = self._choose(batch)
        return self._tokens

    def decision(self) -> SpeculationDecision:
        """Reason for the current draft length, as counted in the speculation statistics.

        It is `not_worth_it` where the controller would send less than half a token per row, which
        rounds to zero.
        """
        if self._is_probe:
            return "probed"
        decision = self.controller.decision
        return "not_worth_it" if decision == "drafted" and self._tokens == 0 else decision

    def reset(self) -> None:
        """Discard what the controller learned from earlier drafts, but keep measured step costs."""
        self.controller = type(self.controller)(self.controller.cost)
        self._probes, self._hold_steps = INITIAL_PROBES, 0

    def begin_profile(self) -> None:
        self.profile = Profile(self._max_draft_tokens)

    def end_profile(self, controller: Controller) -> None:
        self.profile, self.controller, self._hold_steps = None, controller, 0

    def record_step(
        self, *, running: int, context: int, verified: int, seconds: float, emitted: int
    ) -> None:
        """Record the measured time of a step, in the startup profile or in the controller."""
        measured = {"running": running, "context": context, "verified": verified}
        if self.profile is not None:
            self.profile.record_step(**measured, seconds=seconds)
        else:
            self.controller.record_step(**measured, seconds=seconds, emitted=emitted)

    def _choose(self, batch: BatchState) -> int:
        self._is_probe = False
        if self.profile is not None:
            return self._clamp(self.profile.next_length(batch.running), batch.running)
        self._num_choices += 1
        if self._num_choices % PROBE_INTERVAL == 0:
            self._probes = max(self._probes, PROBE_BURST)
        length = self._clamp(self._best_length(batch), batch.running)
        if length == 0 and self.controller.decision != "baseline":
            self._is_probe = batch.on_trial or self._probes > 0
        if self._is_probe or length > 0:
            self._probes = max(0, self._probes - 1)
        return self._shortest_draft(batch.running) if self._is_probe else length

    def _clamp(self, limit: int, running: int) -> int:
        """Longest draft length up to `limit`; with CUDA graphs, the longest captured one."""
        if self._max_samples is None:
            return min(limit, self._max_draft_tokens)
        return max((n for n in self._lengths_with_graph(running) if n <= limit), default=0)

    def _shortest_draft(self, running: int) -> int:
        """Shortest available draft length above zero, or zero if there is none."""
        if self._max_samples is None:
            return 1
        return min((n for n in self._lengths_with_graph(running) if n > 0), default=0)

    def _lengths_with_graph(self, running: int) -> list[int]:
        assert self._max_samples is not None, "there are CUDA graphs"
        return [
            n
            for n, most in self._max_samples.items()
            if running <= most and n <= self._max_draft_tokens
        ]

    def _best_length(self, batch: BatchState) -> int:
        if not self.controller.should_draft(batch.running):
            return 0
        drafted = UniformDrafts(
            lengths=np.full(batch.running, self._max_draft_tokens, np.int32),
            probability=np.tile(batch.probability, (batch.running, 1)),
        )
        lengths = self.controller.lengths(drafted, running=batch.running, context=batch.context)
        return round(float(lengths.mean()))
