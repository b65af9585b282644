"""How long a batch's drafts are: one length for all, held for a few steps so that it can be timed.

Which one is left to the controller that `siblings` has, with its cost model and its guard. It
weighs tokens one by one; here all rows are alike, so it is told of rows that are alike, and the
number that it would send is rounded to whole rows. While it sends nothing it learns nothing of the
drafter, so now and then, and while a new drafter is on trial, one token is drafted all the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.protocol import SpeculationDecision
from engine.speculation.controller import Controller
from engine.speculation.cost import Step as CostStep
from engine.speculation.cost import StepCostModel
from engine.speculation.profile import Profile

HOLD_STEPS: Final = 4
"""Steps that a length is kept for at least."""
PROBE_INTERVAL: Final = 128
"""Lengths chosen from one probe to the next, of which there are so many in a row:"""
PROBE_BURST: Final = 2
INITIAL_PROBES: Final = 16
"""After the weights or the drafter changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformDrafts:
    """Drafts of as many rows, to the controller: contract Draft."""

    lengths: NDArray[np.int32]
    probability: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """What runs: that many samples past their prompts, of so many tokens; how likely a draft's
    tokens are to be accepted, place by place; and whether its drafter is on trial."""

    running: int
    context: int
    probability: NDArray[np.float32]
    on_trial: bool


class DraftLengthPolicy:
    """`controller` is another one after every change of what drafts or of what is drafted for.
    `max_samples`: by length, where only for some there are CUDA graphs, how many samples they have
    room for; no other is chosen.
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
        """Of the next step."""
        self._hold_steps -= 1
        if self._hold_steps < 0:
            self._hold_steps = HOLD_STEPS - 1
            self._tokens = self._choose(batch)
        return self._tokens

    def decision(self) -> SpeculationDecision:
        """Where less than half a token a row was worth it, none is drafted."""
        if self._is_probe:
            return "probed"
        decision = self.controller.decision
        return "not_worth_it" if decision == "drafted" and self._tokens == 0 else decision

    def reset(self) -> None:
        """What was found of drafts before is no more than a guess; what steps cost is still so."""
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
        """A step that can be timed."""
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
        """The longest that is no longer than wanted."""
        if self._max_samples is None:
            return min(limit, self._max_draft_tokens)
        return max((n for n in self._lengths_with_graph(running) if n <= limit), default=0)

    def _shortest_draft(self, running: int) -> int:
        """That drafts anything."""
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
