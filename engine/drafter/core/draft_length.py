"""Draft length of a batch: one length for all rows, held for a few steps so that it can be timed.

The choice is made by the speculation `Controller` of mode `siblings`, with its cost model and its
limits on losses. The controller considers single tokens of single rows; here it receives identical
rows, and the number of tokens it would send is rounded to whole rows. Without drafts nothing is
learned about the drafter, so occasionally, and while a new drafter is on trial, one token is
drafted anyway (a probe).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.speculation.controller import Controller
from engine.speculation.cost import Step as CostStep
from engine.speculation.cost import StepCostModel
from engine.speculation.profile import Profile
from engine.stats import SpeculationDecision

HOLD_STEPS: Final = 4
"""Minimum number of steps that a length is kept for."""
PROBE_INTERVAL: Final = 128
"""Choices of a length between two bursts of PROBE_BURST probes."""
PROBE_BURST: Final = 2
INITIAL_PROBES: Final = 16
"""Probes after a change of the weights or the drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformDrafts:
    """Drafts of identical rows; implements the controller's `Draft` protocol."""

    lengths: NDArray[np.int32]
    probability: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """The decode rows of a batch: their number and their total context in tokens.

    `probability` is the acceptance probability per draft position; `on_trial` is true while the
    drafter is on trial.
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
        """The decision for the current length.

        It is `not_worth_it` where the controller would send less than half a token per row, which
        rounds to zero.
        """
        if self._is_probe:
            return "probed"
        decision = self.controller.decision
        return "not_worth_it" if decision == "drafted" and self._tokens == 0 else decision

    def reset(self) -> None:
        """Discard the controller's state, which applied to other drafts, but keep step costs."""
        self.controller = type(self.controller)(self.controller.cost)
        self._probes, self._hold_steps = INITIAL_PROBES, 0

    def begin_profile(self) -> None:
        self.profile = Profile(self._max_draft_tokens)

    def end_profile(self) -> list[CostStep]:
        assert self.profile is not None, "begun"
        steps = self.profile.steps()
        self.controller = Controller(StepCostModel(steps))
        self.profile, self._hold_steps = None, 0
        return steps

    def record_step(
        self, *, running: int, context: int, verified: int, seconds: float, emitted: int
    ) -> None:
        """Record a step that can be timed."""
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
        if length == 0 and self.controller.decision != "checked":
            self._is_probe = batch.on_trial or self._probes > 0
        if self._is_probe or length > 0:
            self._probes = max(0, self._probes - 1)
        return self._shortest_draft(batch.running) if self._is_probe else length

    def _clamp(self, limit: int, running: int) -> int:
        """The longest available length up to `limit`."""
        if self._max_samples is None:
            return min(limit, self._max_draft_tokens)
        return max((n for n in self._lengths_with_graph(running) if n <= limit), default=0)

    def _shortest_draft(self, running: int) -> int:
        """The shortest available length above zero."""
        if self._max_samples is None:
            return 1
        return min((n for n in self._lengths_with_graph(running) if n > 0), default=0)

    def _lengths_with_graph(self, running: int) -> list[int]:
        assert self._max_samples is not None, "all lengths are alike"
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
