"""Models of the time of a simulated decode step: linear, or measured on an engine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.speculation.cost import Step, StepCostModel


class Costs(Protocol):
    def of(self, *, running: int, context: int, tokens: int) -> float:
        """Seconds of a decode step that computes `tokens` tokens."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Models the seconds of a decode step as a fixed cost plus a cost per token."""

    fixed: float
    token: float

    def of(self, *, running: int, context: int, tokens: int) -> float:
        return self.fixed + self.token * tokens


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Models the seconds of a decode step by measurements of an engine."""

    cost: StepCostModel

    def of(self, *, running: int, context: int, tokens: int) -> float:
        verified = np.array([tokens])
        return float(self.cost.seconds(running=running, context=context, verified=verified)[0])


def measured_steps(record: Path) -> list[Step]:
    """Step times from the last part of a `bench.speculation` record; empty without a record."""
    rounds = json.loads(record.read_text())["raw"]["rounds"] if record.exists() else []
    parts = [[Step(**step) for step in one["steps"]] for one in rounds if one["steps"]]
    return parts[-1] if parts else []
