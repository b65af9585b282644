"""Benchmark: the host path, which is all that a token costs around the model.

    python -m bench.host_path                     the whole table, and its record
    python -m bench.host_path --quick             one load with and without logprobs, no record
    python -m bench.host_path --micro [--cases "logprobs" "no logprobs" ...] [--rounds N]

A model whose step takes next to no time is generated from by this server, by `vllm serve`, and by
both engines alone, in turn; all others are idle while one is measured. Its executor returns token
ids and logprobs at once, with asynchronous scheduling, as on a GPU. A second model, of one layer,
is computed. Both servers have the same limits, and EngineCore and the worker in one process, as
vLLM has them for one GPU. `vllm serve` returns token ids, and has no tokenizer: it decodes nothing.

Prompts are token ids. The client is a process of its own, whose time is not counted. Processor
times are those of Linux for all threads of a process.

`--micro` prints the processor time per token that each stage takes, for this server with its hooks
and for vLLM without them, each in one thread of a process. Times are divided by that of a fixed
loop of Python which runs after each step, so other processes may run meanwhile. A case takes 15
seconds.
"""

import argparse
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import uvloop

from bench.harness.host_path import micro
from bench.harness.host_path.arms import (
    ASYNC_LLM,
    GENERATE,
    OUR_COMPLETIONS,
    OUR_ENGINE,
    OUR_JSON,
    OUR_STREAM,
    PACKED,
    VLLM,
    VLLM_STREAM,
    Arm,
    arms,
)
from bench.harness.host_path.loads import Load
from bench.harness.host_path.micro_cases import CASES
from bench.harness.paired_runs import Pairs, Ratio, alternate
from bench.harness.random_model import write_model
from bench.harness.record import Record, Row, add_out

MODEL_SHAPE: Final = "tiny-drafter"
"""One layer, with the vocabulary of the bundled tokenizer."""
CORE_GOAL, SERVICE_GOAL, LOGPROBS_GOAL, SERVE_GOAL, GAP_GOAL = 14, 3, 0.97, 2.5, 1.0
ALL = (PACKED, OUR_JSON, OUR_STREAM, OUR_COMPLETIONS, OUR_ENGINE) + (
    VLLM,
    VLLM_STREAM,
    GENERATE,
    ASYNC_LLM,
)
WITHOUT_LOGPROBS = (OUR_COMPLETIONS, OUR_ENGINE, VLLM, GENERATE, ASYNC_LLM)
"""A rollout always has logprobs."""
ONE_BY_ONE = {
    num_samples: Load(num_groups=num_samples, num_waves=max(1, 128 // num_samples))
    for num_samples in (16, 64, 256, 512)
}
BARE = {number: Load(num_groups=number, logprobs=None) for number in (256, 512)}
GROUPS = Load(num_groups=16, group_size=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A load and the arms that are measured with it."""

    load: Load
    arms: Sequence[str]


NULL_CELLS: Final = (
    *(Cell(load=load, arms=ALL) for load in (*ONE_BY_ONE.values(), GROUPS)),
    *(Cell(load=load, arms=WITHOUT_LOGPROBS) for load in BARE.values()),
    Cell(
        load=Load(num_groups=256, logprobs=20),
        arms=(PACKED, OUR_JSON, OUR_ENGINE, VLLM, GENERATE, ASYNC_LLM),
    ),
    Cell(load=Load(num_groups=256, has_support=True), arms=(PACKED, OUR_JSON, OUR_ENGINE)),
)
COMPUTED_CELLS: Final = tuple(
    Cell(load=load, arms=(PACKED, VLLM)) for load in (ONE_BY_ONE[256], GROUPS)
)
SPECULATION_CELLS: Final = (Cell(load=GROUPS, arms=(PACKED,)),)
SPECULATION = {
    "--speculation.mode": "siblings",
    "--speculation.allow-predicted-loss": "true",
}
QUICK_CELLS: Final = (
    Cell(load=ONE_BY_ONE[256], arms=(PACKED, VLLM)),
    Cell(load=BARE[256], arms=(OUR_COMPLETIONS, VLLM)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Measured cells of one model."""

    name: str
    cells: Sequence[Cell]
    arms: dict[str, Arm]

    def rows(self) -> list[Row]:
        return [
            Row(
                what=f"{self.name}, {cell.load.name}: {name}",
                value=_medians(cell.load, self.arms[name]),
            )
            for cell in self.cells
            for name in cell.arms
        ]


async def measure(
    name: str,
    model: Path,
    cells: Sequence[Cell],
    rounds: int,
    *,
    computes: bool = False,
    **options: object,
) -> Part:
    names = {arm for cell in cells for arm in cell.arms}
    async with arms(model, names, computes=computes, **options) as started:
        for cell in cells:
            runs: list[Callable[[], Awaitable[None]]] = [
                partial(started[arm].run, cell.load) for arm in cell.arms
            ]
            await alternate(runs, rounds=rounds)
            for arm in cell.arms:
                print(
                    f"{name}, {cell.load.name}: {arm}: {_medians(cell.load, started[arm])}",
                    flush=True,
                )
    return Part(name=name, cells=cells, arms=started)


def _median(arm: Arm, load: Load, quantity: str) -> float:
    return statistics.median(arm.values(load, quantity))


def _medians(load: Load, arm: Arm) -> str:
    rate, core, service, size = (
        _median(arm, load, quantity)
        for quantity in ("tokens_per_second", "core_us", "service_us", "bytes_per_token")
    )
    text = f"{rate:,.0f} tokens/s; EngineCore {core:.1f}, service {service:.1f} us per token"
    text += f"; {size:.0f} bytes" if size else ""
    if arm.name in (OUR_STREAM, VLLM_STREAM):
        text += f"; p99 between deliveries {_median(arm, load, 'p99_gap_ms'):.0f} ms"
    return text


def goal_rows(part: Part) -> list[Row]:
    """Rows of the goals, with the null executor."""
    found = part.arms
    return [
        *(
            _ratio_row(
                f"{load.name}: tokens/s, {PACKED} / {VLLM}",
                _ratio(found[PACKED], load, found[VLLM], load),
                SERVE_GOAL,
            )
            for load in (ONE_BY_ONE[256], ONE_BY_ONE[512], GROUPS)
        ),
        *(
            _ratio_row(
                f"{number} x 1: tokens/s with / without logprobs, {name}",
                _ratio(found[name], ONE_BY_ONE[number], found[name], bare),
                LOGPROBS_GOAL if name == OUR_ENGINE else None,
            )
            for number, bare in BARE.items()
            for name in (OUR_ENGINE, ASYNC_LLM, VLLM)
        ),
        _time_row(found[PACKED], "EngineCore", "core_us", CORE_GOAL),
        _time_row(found[PACKED], "service", "service_us", SERVICE_GOAL),
        *(
            _ratio_row(
                f"{load.name}: p99 between deliveries, {VLLM_STREAM} / {OUR_STREAM}",
                _ratio(found[VLLM_STREAM], load, found[OUR_STREAM], load, "p99_gap_ms"),
                GAP_GOAL,
            )
            for load in ONE_BY_ONE.values()
        ),
    ]


def _ratio(
    arm: Arm, load: Load, baseline: Arm, of: Load, quantity: str = "tokens_per_second"
) -> Ratio:
    return Pairs(a=arm.values(load, quantity), b=baseline.values(of, quantity)).ratio()


def _ratio_row(what: str, ratio: Ratio, goal: float | None) -> Row:
    return Row(
        what=what,
        value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
        goal="" if goal is None else f">= {goal}",
        verdict="" if goal is None else ratio.verdict(goal),
    )


def _time_row(arm: Arm, process: str, quantity: str, goal: float) -> Row:
    load = ONE_BY_ONE[256]
    found = _median(arm, load, quantity)
    return Row(
        what=f"{load.name}: {process}, us per token, {arm.name}",
        value=f"{found:.1f}",
        goal=f"<= {goal}",
        verdict="met" if found <= goal else "missed",
    )


def record(parts: Sequence[Part]) -> Record:
    null, *_ = parts
    return Record(
        name="host_path",
        claim="Tokens per second and processor time per token around a model whose step takes next "
        "to no time: this server, `vllm serve`, and both engines alone. Groups x samples that run "
        "at once, prompts of 32 tokens, responses of 128 tokens.",
        rows=[*goal_rows(null), *(row for part in parts for row in part.rows())],
        raw={
            part.name: {
                arm.name: {load: list(map(asdict, runs[1:])) for load, runs in arm.measured.items()}
                for arm in part.arms.values()
            }
            for part in parts
        },
    )


async def measure_all(folder: Path, rounds: int) -> Record:
    model = write_model(folder / "model", MODEL_SHAPE)
    repeating = write_model(folder / "repeating", MODEL_SHAPE, repeats=True)
    return record(
        [
            await measure("null executor", model, NULL_CELLS, rounds),
            await measure("one layer", model, COMPUTED_CELLS, rounds, computes=True),
            await measure(
                "one layer that repeats, speculation",
                repeating,
                SPECULATION_CELLS,
                rounds,
                computes=True,
                **SPECULATION,
            ),
            await measure(
                "one layer that repeats", repeating, SPECULATION_CELLS, rounds, computes=True
            ),
        ]
    )


def print_micro(names: Sequence[str], num_rounds: int, folder: Path) -> None:
    """Print the microseconds of processor time per token of each stage."""
    cases = [case for case in CASES if case.name in names]
    heads = (*micro.STAGES, "EngineCore", "service", f"{micro.ADD} (request)", "calibration (ns)")
    print(f"{'':32}" + "".join(f"{head:>{max(10, len(head) + 2)}}" for head in heads))
    model = write_model(folder / "model", MODEL_SHAPE)
    for case, sides in micro.measure(model, cases, num_rounds):
        for side, found in sides.items():
            values = [found.stages[stage] for stage in micro.STAGES]
            values += [found.sum(micro.ENGINE_CORE), found.sum(micro.SERVICE)]
            values += [found.stages[micro.ADD], 1000 * found.calibration]
            columns = zip(heads, values, strict=True)
            row = "".join(f"{value:>{max(10, len(head) + 2)}.2f}" for head, value in columns)
            print(f"{case.name:25}{side:7}{row}", flush=True)


async def quick(folder: Path) -> None:
    model = write_model(folder / "model", MODEL_SHAPE)
    await measure("null executor", model, QUICK_CELLS, rounds=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="two loads, at most 90 seconds")
    mode.add_argument("--micro", action="store_true", help="stages, by the time of their thread")
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, help="of --micro")
    parser.add_argument("--rounds", type=int, default=3)
    add_out(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.micro:
            return print_micro(given.cases, given.rounds, folder)
        if given.quick:
            return uvloop.run(quick(folder))
        result = uvloop.run(measure_all(folder, given.rounds))
    result.show()
    print(f"\nwrote {result.write(given.out).name}")


if __name__ == "__main__":
    main()
