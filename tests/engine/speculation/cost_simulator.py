"""A simulated machine with step costs, and simulated drafts with acceptance probabilities."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.speculation.controller import Controller


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Step costs in seconds."""

    call: float = 1e-3
    row: float = 2e-5
    token: float = 1e-4
    free_tokens: int = 8
    context: float = 1e-8
    noise: float = 0.02

    def seconds(self, *, running: int, context: int, verified: int) -> float:
        tokens = max(verified - self.free_tokens, 0)
        return self.call + self.row * running + self.token * tokens + self.context * context

    def measured(self, chance: np.random.Generator, **step: int) -> float:
        return self.seconds(**step) * float(np.exp(self.noise * chance.normal()))


@dataclass(frozen=True, kw_only=True)
class Drafts:
    lengths: NDArray[np.int32]
    probability: NDArray[np.float32]

    @classmethod
    def alike(cls, rows: int, max_draft_tokens: int, probability: float) -> "Drafts":
        return cls(
            lengths=np.full(rows, max_draft_tokens, np.int32),
            probability=np.full((rows, max_draft_tokens), probability, np.float32),
        )


@dataclass
class Run:
    """Steps of one batch under one controller.

    `predicted` is the drafts' own acceptance probability, `actual` the simulated one.
    """

    controller: Controller
    machine: Machine
    running: int
    predicted: float
    actual: float
    context_a_row: int = 100
    max_draft_tokens: int = 8
    seconds: float = 0.0
    emitted: int = 0
    steps: int = 0
    off_steps: int = 0

    def go(self, steps: int, chance: np.random.Generator) -> "Run":
        for _ in range(steps):
            self._step(chance)
        return self

    def _step(self, chance: np.random.Generator) -> None:
        context = self.context_a_row * self.running
        sent, drafts = np.zeros(self.running, np.int32), None
        if self.controller.should_draft(self.running):
            drafts = Drafts.alike(self.running, self.max_draft_tokens, self.predicted)
            sent = self.controller.lengths(drafts, running=self.running, context=context)
        verified = self.running + int(sent.sum())
        step = {"running": self.running, "context": context, "verified": verified}
        seconds = self.machine.measured(chance, **step)
        hits = chance.random((self.running, self.max_draft_tokens)) < self.actual
        right = np.cumprod(hits, axis=1).sum(axis=1)
        if drafts is not None:
            self.controller.record_acceptance(drafts, sent.astype(np.int64), right)
        emitted = self.running + int(np.minimum(right, sent).sum())
        self.controller.record_step(**step, seconds=seconds, emitted=emitted)
        self.seconds += seconds
        self.emitted += emitted
        self.steps += 1
        self.off_steps += verified == self.running

    def rate(self) -> float:
        return self.emitted / self.seconds

    def rate_without_drafts(self) -> float:
        step = {"running": self.running, "context": self.context_a_row * self.running}
        return self.running / self.machine.seconds(**step, verified=self.running)


def calibrated(controller: Controller) -> Controller:
    """Trains the controller on drafts whose predictions are accurate."""
    number = 500
    for predicted in np.arange(0.03, 1.0, 0.02):
        drafts = Drafts.alike(number, 1, float(predicted))
        right = (np.arange(number) < predicted * number).astype(np.int64)
        controller.record_acceptance(drafts, np.zeros(number, np.int64), right)
    return controller


def best_possible_rate(
    machine: Machine, *, running: int, probability: float, max_draft_tokens: int = 8
) -> float:
    """The best rate over all fixed draft lengths, the same for all rows, and none."""
    lengths = np.arange(max_draft_tokens + 1)
    emitted = running * np.cumsum(probability**lengths)
    seconds = [
        machine.seconds(running=running, context=100 * running, verified=running * (1 + length))
        for length in lengths.tolist()
    ]
    return float((emitted / np.array(seconds)).max())
