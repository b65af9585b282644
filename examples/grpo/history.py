"""Statistics of each GRPO step, and the significance test whether the policy has learned."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, variance

WINDOW = 10
MIN_GAIN = 0.10
STANDARD_ERRORS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Statistics of one GRPO step; its rewards are of samples from before its weight update."""

    number: int
    held_out_reward: float
    training_reward: float
    mean_tokens: float
    p95_tokens: float
    versions_behind: float
    """Mean number of updates between the weights that sampled a token and those trained with it."""
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Change of the mean held-out reward from the first WINDOW steps to the last WINDOW steps."""

    before: float
    after: float
    standard_error: float

    @property
    def size(self) -> float:
        return self.after - self.before

    @property
    def learned(self) -> bool:
        return self.size >= max(MIN_GAIN, STANDARD_ERRORS * self.standard_error)

    def __str__(self) -> str:
        return (
            f"held-out reward {self.before:.3f} -> {self.after:.3f}:"
            f" {self.size:+.3f}, standard error {self.standard_error:.3f}"
        )


def compute_gain(steps: Sequence[Step]) -> Gain:
    """Computes the change of the held-out reward from the first to the last WINDOW steps.

    The standard error is from the variance of steps within each window.
    """
    if len(steps) < 2 * WINDOW:
        raise ValueError(f"a gain needs at least {2 * WINDOW} steps, not {len(steps)}")
    rewards = [step.held_out_reward for step in steps]
    first, last = rewards[:WINDOW], rewards[-WINDOW:]
    return Gain(
        before=mean(first),
        after=mean(last),
        standard_error=sqrt((variance(first) + variance(last)) / WINDOW),
    )


def table(steps: Sequence[Step]) -> str:
    """Formats the step statistics as a text table with one line per WINDOW steps."""
    head = f"{'steps':>9} {'held-out':>9} {'training':>9} {'tokens':>7} {'p95':>6} {'behind':>7}"
    head += "".join(f" {part + ' s':>12}" for part in steps[0].seconds)
    windows = [steps[start : start + WINDOW] for start in range(0, len(steps), WINDOW)]
    return "\n".join([head, *map(_line, windows)])


def _line(window: Sequence[Step]) -> str:
    def average(name: str) -> float:
        return float(mean(getattr(step, name) for step in window))

    line = f"{f'{window[0].number}-{window[-1].number}':>9}"
    line += f" {average('held_out_reward'):>9.3f} {average('training_reward'):>9.3f}"
    line += f" {average('mean_tokens'):>7.1f} {average('p95_tokens'):>6.0f}"
    line += f" {average('versions_behind'):>7.2f}"
    parts = window[0].seconds
    return line + "".join(f" {mean(s.seconds[part] for s in window):>12.2f}" for part in parts)


def save(steps: Sequence[Step], path: Path) -> None:
    path.write_text(json.dumps([asdict(step) for step in steps], indent=1) + "\n")
