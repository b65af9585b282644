"""What a step of a replay costs: as stated, or as steps of an engine were measured."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.speculation.cost import Step, StepCostModel


class Costs(Protocol):
    def of(self, *, running: int, context: int, tokens: int) -> float:
        """Seconds of a step that computes so many tokens."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Seconds of a step: `fixed`, and so many more for each token that it computes."""

    fixed: float
    token: float

    def of(self, *, running: int, context: int, tokens: int) -> float:
        return self.fixed + self.token * tokens


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """As an engine's steps were measured."""

    cost: StepCostModel

    def of(self, *, running: int, context: int, tokens: int) -> float:
        verified = np.array([tokens])
        return float(self.cost.seconds(running=running, context=context, verified=verified)[0])


def measured_steps(record: Path) -> list[Step]:
    """What steps took in the last part of a recorded run of `bench.speculation`."""
    rounds = json.loads(record.read_text())["raw"]["rounds"] if record.exists() else []
    parts = [[Step(**step) for step in one["steps"]] for one in rounds if one["steps"]]
    return parts[-1] if parts else []
