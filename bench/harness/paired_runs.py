"""Measures two configurations (arms) alternately, and computes an interval of their ratio.

A machine's speed drifts, so only adjacent runs are compared. The interval is a bootstrap over
pairs. If it contains a goal, the goal is neither met nor missed.
"""

import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Ratio of configuration A to B: the median over pairs of runs, with a 95 % interval."""

    median: float
    low: float
    high: float

    def verdict(self, goal: float) -> str:
        """Verdict on the goal that the ratio is at least `goal`."""
        if self.low >= goal:
            return "met"
        if self.high < goal:
            return "missed"
        return "met, within noise" if self.median >= goal else "missed, within noise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Measurements of two configurations; equal indices were measured one after the other."""

    a: list[float]
    b: list[float]

    def ratio(self) -> Ratio:
        ratios = [one / other for one, other in zip(self.a, self.b, strict=True)]
        # Fixed seed, so that the same measurements give the same interval.
        chance = random.Random(0)
        medians = sorted(
            statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
        )
        low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]
        return Ratio(median=statistics.median(ratios), low=low, high=high)


async def alternate(
    arms: Sequence[Callable[[], Awaitable[None]]], *, rounds: int, warm_up: int = 1
) -> None:
    """Run functions in turn, in reverse in every second round, so that none is always first."""
    for number in range(warm_up + rounds):
        for arm in arms if number % 2 == 0 else reversed(arms):
            await arm()
