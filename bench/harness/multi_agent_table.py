"""Table rows of the results of bench/harness/multi_agent_splice_error.py."""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.harness.multi_agent_splice_error import PREFILLED, TurnScores
from bench.harness.paired_runs import RESAMPLES
from bench.harness.record import Row

LARGEST_DIVERGENCE = 0.05
LARGEST_CHANGE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change of accuracy in percentage points, with a 95 % interval."""

    mean: float
    low: float
    high: float

    def verdict(self, goal: float) -> str:
        """Verdict on the goal that accuracy changes by at most `goal` points."""
        if max(-self.low, self.high) <= goal:
            return "met"
        if self.low > goal or self.high < -goal:
            return "missed"
        return "met, within noise" if abs(self.mean) <= goal else "missed, within noise"


def change(computed: Sequence[float], placed: Sequence[float]) -> Change:
    """Change of accuracy between two modes, with a bootstrap interval over answered prompts."""
    points = [100 * (b - a) for a, b in zip(computed, placed, strict=True)]
    # Fixed seed, so that the same answers give the same interval.
    chance = random.Random(0)
    means = sorted(
        statistics.fmean(chance.choices(points, k=len(points))) for _ in range(RESAMPLES)
    )
    low, high = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]
    return Change(mean=statistics.fmean(points), low=low, high=high)


def agents_rows(found: Sequence[TurnScores]) -> list[Row]:
    return [row for scores in found for row in _rows(scores)]


def _rows(scores: TurnScores) -> list[Row]:
    what = f"agents: {statistics.mean(scores.tokens):.0f} tokens"
    surprise = f"{statistics.mean(scores.surprises):.3f} nats per token"
    ways = [way for way in scores.divergences if way != PREFILLED]
    return [
        Row(what=f"{what}: negative log-likelihood of the right answer, prefilled", value=surprise),
        *(_divergence(what, way, scores) for way in ways),
        *_accuracy(f"{what}: right answers, greedy", scores.greedy, ways),
        *_accuracy(f"{what}: right answers, temperature 1", scores.sampled, ways),
        *_accuracy(f"{what}: probability of the right answer", scores.chances, ways),
    ]


def _divergence(what: str, way: str, scores: TurnScores) -> Row:
    values, share = scores.divergences[way], 100 * statistics.mean(scores.shares[way])
    mean = statistics.mean(values)
    return Row(
        what=f"{what}: KL divergence, {way}",
        value=f"{mean:.4f} nats per token, worst {max(values):.3f}, {share:.0f} % spliced",
        goal=f"< {LARGEST_DIVERGENCE}",
        verdict="met" if mean < LARGEST_DIVERGENCE else "missed",
    )


def _accuracy(what: str, rewards: Mapping[str, Sequence[float]], ways: Sequence[str]) -> list[Row]:
    computed = rewards[PREFILLED]
    rows = [Row(what=f"{what}, {PREFILLED}", value=f"{100 * statistics.mean(computed):.1f} %")]
    for way in ways:
        changed = change(computed, rewards[way])
        points = f"{changed.mean:+.1f} points [{changed.low:+.1f}, {changed.high:+.1f}]"
        rows.append(
            Row(
                what=f"{what}, {way}",
                value=f"{100 * statistics.mean(rewards[way]):.1f} %, {points}",
                goal="within 1 point",
                verdict=changed.verdict(LARGEST_CHANGE),
            )
        )
    return rows
