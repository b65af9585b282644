"""Results of the speculation benchmark: rounds as stored in its record, and table rows."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.paired_runs import Pairs
from bench.harness.record import Row
from bench.harness.speculation_arm import DISABLED, GNU, ROWS
from engine.speculation.cost import Step

BUCKETS = (1, 4, 8, 32, ROWS)
"""Upper bounds of the buckets into which steps are sorted by number of running samples."""
TAIL = 4
"""Most running samples of the steps that are compared as the tail of a workload."""
MIN_SPEED, MIN_SHARE_OF_ORACLE, MIN_SHARE_OF_REPLAY, MIN_SPEEDUP = 0.98, 0.85, 0.97, 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """Result of one run of one arm (drafter configuration) of the speculation benchmark.

    `buckets` holds, by bucket of decode steps, their number, rows, context, seconds and tokens.
    `predicted` is the replay's prediction of their seconds, `cpu_seconds` their CPU time.
    """

    seconds: float
    tokens: int
    drafted: int
    accepted: int
    buckets: dict[str, list[float]]
    predicted: float | None
    cpu_seconds: float | None = None

    def total(self, what: int, most: int = ROWS) -> float:
        return sum(of[what] for bucket, of in self.buckets.items() if int(bucket) <= most)

    def time_per_token(self, *, cpu: bool) -> float:
        """Wall or CPU seconds of the decode steps per token."""
        seconds = self.cpu_seconds if cpu else self.total(SECONDS)
        assert seconds is not None, "an older record"
        return seconds / self.total(TOKENS)

    def rate(self) -> float:
        """Tokens per second in decode steps."""
        return self.total(TOKENS) / max(self.total(SECONDS), 1e-9)

    def sample_seconds(self, most: int) -> float:
        """Time that samples waited for in decode steps of at most `most`: rows times seconds."""
        found = [of for bucket, of in self.buckets.items() if int(bucket) <= most and of[STEPS]]
        return sum(of[RUNNING] * of[SECONDS] / of[STEPS] for of in found)

    def sample_rate(self, most: int) -> float:
        """Tokens per second of each sample in decode steps of at most `most`; 0 if there were none.

        The tokens per second of all would depend on how many samples ran, which drafts change.
        """
        return self.total(TOKENS, most) / max(self.sample_seconds(most), 1e-9)


STEPS, RUNNING, CONTEXT, SECONDS, TOKENS = range(5)
GUARD_PAIRS = (("ours", "off"), ("ours", DISABLED), (f"{DISABLED}-again", DISABLED))
"""Arms that are compared on unpredictable texts; the last pair are the same."""


def summarize_run(run: dict[str, Any], predicted: float | None) -> ArmResult:
    buckets = {str(most): [0.0] * 5 for most in BUCKETS}
    for rows, context, _, tokens, seconds in run["decoded"]:
        bucket = buckets[str(next(most for most in BUCKETS if rows <= most))]
        for what, more in enumerate((1, rows, context, seconds, tokens)):
            bucket[what] += more
    names = ("seconds", "cpu_seconds", "tokens", "drafted", "accepted")
    counted = {name: run[name] for name in names}
    return ArmResult(**counted, buckets=buckets, predicted=predicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A round of the speculation benchmark, in which all arms run the same workload.

    `steps` are the median step times of all rounds measured together, stored with the last one.
    """

    seed: int
    surprise: float
    arms: dict[str, ArmResult]
    steps: list[Step] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def added(cls, record: Path, new: Sequence["Round"]) -> list["Round"]:
        """Rounds stored in a record, plus new ones.

        A new round replaces one with the same seed and arms.
        """
        again = {(one.seed, tuple(sorted(one.arms))) for one in new}
        known = json.loads(record.read_text())["raw"].get("rounds", []) if record.exists() else []
        old = [
            cls(
                seed=one["seed"],
                surprise=one["surprise"],
                arms={name: ArmResult(**arm) for name, arm in one["arms"].items()},
                steps=[Step(**step) for step in one["steps"]],
            )
            for one in known
        ]
        return [one for one in old if (one.seed, tuple(sorted(one.arms))) not in again] + [*new]


def described(name: str, rounds: Sequence[Round]) -> Row:
    runs = [one.arms[name] for one in rounds if name in one.arms]
    counted = [run for run in runs if len(run.buckets) == len(BUCKETS)] or runs
    steps = {most: sum(run.buckets[most][STEPS] for run in counted) for most in counted[0].buckets}
    drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
    took = f", {accepted / drafted:.0%} of {drafted} drafted accepted" if drafted else ""
    context = sum(run.total(CONTEXT) for run in runs) / sum(run.total(RUNNING) for run in runs)
    length = sum(run.total(TOKENS) for run in runs) / sum(run.total(RUNNING) for run in runs)
    running = ", ".join(f"<= {most}: {n / sum(steps.values()):.0%}" for most, n in steps.items())
    return Row(
        what=f"{name}: {len(runs)} runs",
        value=f"{statistics.median(run.rate() for run in runs):.0f} tokens/s, "
        f"{sum(run.tokens for run in runs)} tokens, {length:.2f} per row and step{took}; "
        f"{context:.0f} context tokens per row; steps by running samples {running}",
    )


def speedup(
    rounds: Sequence[Round], other: str, goal: float | None = None, one: str = "ours"
) -> Row:
    """Table row with the ratio of two arms' throughput, overall and with few samples running."""
    pairs = shared(rounds, other, one)
    ratio = Pairs(a=[a.rate() for a, _ in pairs], b=[b.rate() for _, b in pairs]).ratio()
    counted = [pair for pair in pairs if all(str(TAIL) in arm.buckets for arm in pair)]
    tails = [(a.sample_rate(TAIL), b.sample_rate(TAIL)) for a, b in counted]
    tails = [pair for pair in tails if min(pair) > 0]
    few = ""
    if len(tails) > 1:
        tail = Pairs(a=[a for a, _ in tails], b=[b for _, b in tails]).ratio()
        few = f"; with {TAIL} or fewer running, {len(tails)} rounds, {tail.median:.2f}x "
        few += f"[{tail.low:.2f}, {tail.high:.2f}] per sample"
    return Row(
        what=f"{one} over {other}, {len(pairs)} rounds",
        value=f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}] tokens/s{few}",
        goal=f">= {goal:.2f}x" if goal else "",
        verdict=ratio.verdict(goal) if goal else "",
    )


def shared(
    rounds: Sequence[Round], other: str, one: str = "ours"
) -> list[tuple[ArmResult, ArmResult]]:
    both = [each.arms for each in rounds if one in each.arms and other in each.arms]
    return [(arms[one], arms[other]) for arms in both]


def replayed(rounds: Sequence[Round]) -> Row:
    """Table row: measured speedup of drafting, relative to the speedup that a replay predicts."""
    found, predicted = [], []
    for ours, off in shared(rounds, "off"):
        assert ours.predicted and off.predicted
        found.append(off.total(SECONDS) / ours.total(SECONDS))
        predicted.append(off.predicted / ours.predicted)
    ratio = Pairs(a=found, b=predicted).ratio()
    return Row(
        what="speedup over off, measured / predicted by replay",
        value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]; predicted "
        f"{statistics.median(predicted):.2f}x",
        goal=f">= {MIN_SHARE_OF_REPLAY:.2f}",
        verdict=ratio.verdict(MIN_SHARE_OF_REPLAY),
    )


def guard_rows(rounds: Sequence[Round]) -> list[Row]:
    """Table rows on unpredictable texts, where drafting must not lose throughput.

    The goal applies to the lower end of the interval. The comparison of an arm with itself shows
    which ratios are noise.
    """
    names = dict.fromkeys(name for one in rounds for name in one.arms)
    return [
        *(described(name, rounds) for name in names),
        *(
            _guarded(one, other, pairs, cpu=cpu)
            for cpu in (False, True)
            for one, other in GUARD_PAIRS
            if (pairs := _measured_pairs(rounds, one, other, cpu=cpu))
        ),
    ]


def _measured_pairs(
    rounds: Sequence[Round], one: str, other: str, *, cpu: bool
) -> list[tuple[ArmResult, ArmResult]]:
    """Results of two arms in their shared rounds; older rounds have no CPU time."""
    pairs = shared(rounds, other, one)
    return [pair for pair in pairs if not cpu or None not in {arm.cpu_seconds for arm in pair}]


def _guarded(
    one: str, other: str, pairs: Sequence[tuple[ArmResult, ArmResult]], *, cpu: bool
) -> Row:
    """Table row with the ratio of the decode steps' speed of two arms, by wall or CPU time."""
    a, b = ([arm.time_per_token(cpu=cpu) for arm in arms] for arms in zip(*pairs, strict=True))
    ratio = Pairs(a=b, b=a).ratio()
    return Row(
        what=f"{one} over {other}, {len(pairs)} rounds, {'CPU' if cpu else 'wall'} time",
        value=f"{ratio.median:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}] as fast",
        goal=f"lower end >= {MIN_SPEED:.2f}x",
        verdict="met" if ratio.low >= MIN_SPEED else "missed",
    )


def workload_rows(rounds: Sequence[Round]) -> list[Row]:
    goals = {
        "off": None,
        "oracle": MIN_SHARE_OF_ORACLE,
        "ngram": MIN_SPEEDUP,
        "suffix": MIN_SPEEDUP,
    }
    names = list(dict.fromkeys(name for one in rounds for name in one.arms))
    others = [name for name in names if name != "ours" and not name.endswith(GNU)]
    tokens = sum(next(iter(one.arms.values())).tokens for one in rounds)
    rows = [
        Row(
            what="text",
            value=f"{sum(one.surprise for one in rounds) / tokens:.3f} nats per token",
        ),
        *(described(name, rounds) for name in names),
        *(speedup(rounds, n, goals.get(n)) for n in others if shared(rounds, n)),
        *(
            speedup(rounds, gnu, one=name)
            for name in ("off", "ours")
            if shared(rounds, gnu := name + GNU, name)
        ),
    ]
    rows += [
        share_of_oracle(rounds, base) for base in ("off", DISABLED) if _has_oracle(rounds, base)
    ]
    return [*rows, replayed(rounds)] if shared(rounds, "off") else rows


def _has_oracle(rounds: Sequence[Round], base: str) -> bool:
    return any({base, "ours", "oracle"} <= one.arms.keys() for one in rounds)


def share_of_oracle(rounds: Sequence[Round], base: str) -> Row:
    """Table row: speedups by drafting and by the oracle, in the total time of all rounds."""
    names = (base, "ours", "oracle")
    complete = [one.arms for one in rounds if one.arms.keys() >= {*names}]
    seconds = {name: sum(arms[name].total(SECONDS) for arms in complete) for name in names}
    ours, oracle = (seconds[base] / seconds[name] for name in names[1:])
    tails = {name: _tail_rate([arms[name] for arms in complete]) for name in names}
    tail = ""
    if tails[base]:
        few = [f"{tails[name] / tails[base]:.2f}x" for name in names[1:]]
        tail = f"; with {TAIL} or fewer running {' and '.join(few)} per sample"
    return Row(
        what=f"ours and oracle over {base}, total of {len(complete)} rounds",
        value=f"{ours:.2f}x and {oracle:.2f}x tokens/s{tail}",
    )


def _tail_rate(runs: Sequence[ArmResult]) -> float:
    """Tokens per second of each sample over all runs, with few samples running."""
    seconds = sum(run.sample_seconds(TAIL) for run in runs)
    return sum(run.total(TOKENS, TAIL) for run in runs) / max(seconds, 1e-9)
