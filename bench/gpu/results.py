"""Results of a run, read from its folder, and their comparison with a criterion."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from pathlib import Path
from typing import Any, Final, Literal

from bench.gpu.jobs import read_json
from bench.gpu.timers import differences
from bench.gpu.turns import read_lines
from bench.harness.paired_runs import Pairs, Ratio

Answer = Literal["yes", "no", "not measured"]
STEP: Final = "EngineCoreProc._process_engine_step"
NOTHING: Final[Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    question: str
    criterion: str
    figure: str
    answer: Answer


class Results:
    """Results of a folder. A rehearsal's are from a CPU, and decide nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def on_gpu(self) -> bool:
        return bool((self.json("environment.json").get("machine") or NOTHING).get("gpus"))

    def json(self, name: str) -> Any:
        return read_json(self._folder / name) or {}

    def files(self, pattern: str) -> list[Path]:
        return sorted(self._folder.glob(pattern))

    def lines(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self._folder / name)

    def batches(self, mode: str, batch: str) -> list[dict[str, Any]]:
        """Runs of a batch after the warm-up, each with what it added to the timers."""
        lines = self.lines(f"arm-{mode}.jsonl")
        runs = []
        for line, after in zip(lines, lines[1:], strict=False):
            if line["batch"] == batch:
                added = differences(after.get("timers_before", {}), line["timers_before"])
                runs.append(line | {"timers": added})
        return runs[1:]

    def speedup(self, mode: str, other: str, batch: str) -> Ratio | None:
        """Tokens per second of a mode to those of another one, over pairs of runs."""
        a, b = (
            [run["tokens"] / run["seconds"] for run in self.batches(each, batch)]
            for each in (mode, other)
        )
        pairs = min(len(a), len(b))
        return Pairs(a=a[:pairs], b=b[:pairs]).ratio() if pairs else None

    def step_seconds(self, mode: str, batch: str) -> float | None:
        """Seconds of a batch's engine steps, on average."""
        runs = self.batches(mode, batch)
        steps = sum_of(run["timers"] for run in runs).get(STEP)
        return fsum(run["seconds"] for run in runs) / steps["calls"] if steps else None

    def kernel_us(self, arm: str, batch: str, **variant: Any) -> float | None:
        """Shortest time with flushed L2, of 16 query heads, blocks of 16 and NHD unless given."""
        wanted = {"heads": [16, 8], "block_size": 16, "layout": "NHD", "num_splits": 0} | variant
        wanted |= {"arm": arm, "batch": batch, "flushed": True}
        for found in self.json("kernels.json").get("times", []):
            if all(found[name] == value for name, value in wanted.items()):
                return float(min(found["us"]))
        return None

    def decide(
        self, question: str, criterion: str, figures: Sequence[tuple[str, bool | None]]
    ) -> Decision:
        """Yes if all figures meet their part of the criterion; None is not measured."""
        met = [each for _, each in figures]
        text = "; ".join(figure for figure, each in figures if each is not None) or "nothing"
        if not self.on_gpu:
            return Decision(
                question=question,
                criterion=criterion,
                figure=f"not on a CPU ({text})",
                answer="not measured",
            )
        answer: Answer = (
            "no" if False in met else "yes" if met and None not in met else "not measured"
        )
        return Decision(question=question, criterion=criterion, figure=text, answer=answer)


def quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def at(name: str, value: float | None, is_met: Callable[[float], bool]) -> tuple[str, bool | None]:
    return (name, None) if value is None else (f"{name}: {value:.3g}", is_met(value))


def interval(
    name: str, ratio: Ratio | None, is_met: Callable[[float], bool]
) -> tuple[str, bool | None]:
    if ratio is None:
        return name, None
    text = f"{name}: {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
    return text, is_met(ratio.median)


def sum_of(timers: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    total: dict[str, dict[str, float]] = {}
    for each in timers:
        for name, sums in each.items():
            before = total.get(name, {})
            total[name] = {key: value + before.get(key, 0) for key, value in sums.items()}
    return total
