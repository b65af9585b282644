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

from engine.protocol import SpeculationChoice
from engine.speculation.controller import Controller
from engine.speculation.cost import Step as CostStep
from engine.speculation.cost import StepCost
from engine.speculation.profile import Profile

HELD: Final = 4
"""Steps that a length is kept for at least."""
PROBED_EVERY: Final = 128
"""Lengths chosen from one probe to the next, of which there are so many in a row:"""
PROBES: Final = 2
NEW_PROBES: Final = 16
"""After the weights or the drafter changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Drafts of as many rows, to the controller: contract Draft."""

    lengths: NDArray[np.int32]
    probability: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What runs: that many samples past their prompts, of so many tokens; how likely a draft's
    tokens are to be accepted, place by place; and whether its drafter is on trial."""

    running: int
    context: int
    probability: NDArray[np.float32]
    on_trial: bool


class Length:
    """`controller` is another one after every change of what drafts or of what is drafted for.
    `most_samples`: by length, where only for some there are CUDA graphs, how many samples they have
    room for; no other is chosen.
    """

    def __init__(
        self, longest: int, controller: Controller, most_samples: Mapping[int, int] | None = None
    ) -> None:
        self.controller = controller
        self.profile: Profile | None = None
        self._longest = longest
        self._most_samples = most_samples
        self._tokens = 0
        self._is_probe = False
        self._held = 0
        self._probes = NEW_PROBES
        self._num_chosen = 0

    def at(self, asked: Asked) -> int:
        """Of the next step."""
        self._held -= 1
        if self._held < 0:
            self._held = HELD - 1
            self._tokens = self._chosen(asked)
        return self._tokens

    def choice(self) -> SpeculationChoice:
        """Where less than half a token a row was worth it, none is drafted."""
        if self._is_probe:
            return "probed"
        choice = self.controller.choice
        return "not_worth_it" if choice == "drafted" and self._tokens == 0 else choice

    def begin_anew(self) -> None:
        """What was found of drafts before is no more than a guess; what steps cost is still so."""
        self.controller = type(self.controller)(self.controller.cost)
        self._probes, self._held = NEW_PROBES, 0

    def begin_profile(self) -> None:
        self.profile = Profile(self._longest)

    def end_profile(self) -> list[CostStep]:
        assert self.profile is not None, "begun"
        steps = self.profile.steps()
        self.controller = Controller(StepCost(steps))
        self.profile, self._held = None, 0
        return steps

    def observed(
        self, *, running: int, context: int, verified: int, seconds: float, emitted: int
    ) -> None:
        """A step that can be timed."""
        measured = {"running": running, "context": context, "verified": verified}
        if self.profile is not None:
            self.profile.observed(**measured, seconds=seconds)
        else:
            self.controller.observed(**measured, seconds=seconds, emitted=emitted)

    def _chosen(self, asked: Asked) -> int:
        self._is_probe = False
        if self.profile is not None:
            return self._allowed(self.profile.next_length(asked.running), asked.running)
        self._num_chosen += 1
        if self._num_chosen % PROBED_EVERY == 0:
            self._probes = max(self._probes, PROBES)
        length = self._allowed(self._worth_it(asked), asked.running)
        if length == 0 and self.controller.choice != "checked":
            self._is_probe = asked.on_trial or self._probes > 0
        if self._is_probe or length > 0:
            self._probes = max(0, self._probes - 1)
        return self._shortest(asked.running) if self._is_probe else length

    def _allowed(self, wanted: int, running: int) -> int:
        """The longest that is no longer than wanted."""
        if self._most_samples is None:
            return min(wanted, self._longest)
        return max((n for n in self._with_room(running) if n <= wanted), default=0)

    def _shortest(self, running: int) -> int:
        """That drafts anything."""
        if self._most_samples is None:
            return 1
        return min((n for n in self._with_room(running) if n > 0), default=0)

    def _with_room(self, running: int) -> list[int]:
        assert self._most_samples is not None, "all lengths are alike"
        return [
            n for n, most in self._most_samples.items() if running <= most and n <= self._longest
        ]

    def _worth_it(self, asked: Asked) -> int:
        if not self.controller.wants_drafts(asked.running):
            return 0
        drafted = Alike(
            lengths=np.full(asked.running, self._longest, np.int32),
            probability=np.tile(asked.probability, (asked.running, 1)),
        )
        lengths = self.controller.lengths(drafted, running=asked.running, context=asked.context)
        return round(float(lengths.mean()))
