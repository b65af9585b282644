"""Benchmark: whole decode steps with shared-prefix attention, against vLLM's own attention.

One engine in one process with the environment of the server's EngineCore;
bench/harness/decode_timing.py describes how its steps are timed. The model has 25M random
parameters: 8 layers, 8 query and 4 KV heads of 64, bfloat16.

Each part takes a minute or two in its own process and engine, and its steps are saved in build/. On
a machine that is idle only for minutes at a time, `--part` measures one part, and `--merge` writes
the record from the saved ones. Without either, all parts are measured.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from bench.harness.decode_timing import BLOCK, DRAFTED, LONGEST, Case, Engine, Steps, write_config
from bench.harness.prefix_trees import Tree
from bench.harness.record import Record, Row, add_out
from engine.launch.environment import engine_environment
from engine.runtime.process_environment import started_by_coppice
from engine.settings import EngineSettings

PARTS = {
    "long": (
        Case(num_groups=1, group_size=32, prefix=16384, goal=3.0),
        Case(num_groups=1, group_size=32, prefix=4096, goal=1.9),
        Case(num_groups=1, group_size=32, prefix=1024, goal=1.3),
        Case(num_groups=1, group_size=128, prefix=4096, goal=2.0),
        Case(num_groups=8, group_size=8, prefix=1024, system=1024, goal=1.3),
        Case(num_groups=8, group_size=8, prefix=4096, goal=2.08),
    ),
    "curve": (
        Case(num_groups=1, group_size=32, prefix=2048),
        Case(num_groups=1, group_size=32, prefix=8192),
    ),
    "groups": (Case(num_groups=64, group_size=8, prefix=512, goal=1.29),),
    "others": (
        Case(num_groups=1, group_size=32, prefix=64, goal=1.03),
        Case(num_groups=256, group_size=1, prefix=128, goal=1.0),
    ),
    "speculated": (Case(num_groups=1, group_size=32, prefix=4096, drafted=DRAFTED),),
}
CASES = sorted(
    (case for part in PARTS.values() for case in part),
    key=lambda case: (case.num_groups, case.group_size, case.drafted, case.system + case.prefix),
)


def planning_rows() -> list[Row]:
    """Table rows: time to plan prefix sharing of 256 samples of 4096 tokens, in two layouts."""
    return [
        planning_row("groups of 8", Tree(levels=((32, 4064),), rows_per_leaf=8, suffix=32)),
        planning_row(
            "8 groups of 32 after 1024 tokens shared by all groups",
            Tree(levels=((1, 1024), (8, 3040)), rows_per_leaf=32, suffix=32),
        ),
    ]


def planning_row(what: str, tree: Tree) -> Row:
    from engine.attention.grouping import Planner

    _, blocks = tree.laid_out(BLOCK, torch.Generator().manual_seed(0))
    table = np.zeros((tree.num_rows, 544), np.int32)
    table[:, : blocks.shape[1]] = np.random.default_rng(1).permutation(blocks.numpy())
    positions = np.full(tree.num_rows, tree.length - 1, np.int32)
    anew: list[float] = []
    same: list[float] = []
    reused_planner = Planner(BLOCK)
    for _ in range(500):
        for planner, times in ((Planner(BLOCK), anew), (reused_planner, same)):
            began = time.thread_time()
            planner.plan(table, positions)
            times.append(1e6 * (time.thread_time() - began))
    median = statistics.median(anew)
    return Row(
        what=f"planning 256 rows of 4096 tokens, {what}",
        value=f"{median:.0f} us for a new plan, {statistics.median(same):.0f} us for an unchanged "
        "plan",
        goal="<= 200 us",
        verdict="met" if median <= 200 else "missed",
    )


def measure(part: str, *, alone: bool, seconds: float, rounds: int) -> None:
    drafting = {"method": "custom_class", "model": "bench.harness.decode_timing.Drafts"}
    speculated = {"speculative_config": drafting | {"num_speculative_tokens": DRAFTED}}
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder) / "model")
        settings = speculated if part == "speculated" else {}
        engine = Engine(model, Path(folder), alone=alone, **settings)
        measured = {}
        results = measured_file(alone)
        results.mkdir(parents=True, exist_ok=True)
        for case in PARTS[part]:
            steps = engine.measure(case, seconds=seconds, rounds=rounds)
            print(steps.row(case.name, case.goal), flush=True)
            measured[case.name] = asdict(steps)
            (results / f"{part}.json").write_text(json.dumps(measured))
        engine.close()


def measured_file(alone: bool) -> Path:
    return Path("build/shared_prefix") / ("alone" if alone else "shared")


def load_measured(alone: bool) -> dict[str, Steps]:
    """Read the step times of the benchmark parts that have been measured."""
    files = [measured_file(alone) / f"{part}.json" for part in PARTS]
    parts = [json.loads(file.read_text()) for file in files if file.exists()]
    return {name: Steps(**steps) for part in parts for name, steps in part.items()}


def record(measured: dict[str, Steps], *, alone: bool) -> Record:
    how = "" if alone else " One thread on a machine with other work, its processor time."
    return Record(
        name="shared_prefix_decode" if alone else "shared_prefix_decode_shared",
        bench="shared_prefix_decode",
        claim="Decode steps with shared-prefix attention, against vLLM's own attention over the "
        f"same cache: 25M parameters in bfloat16, block size 32.{how}",
        rows=[
            *(
                measured[case.name].row(case.name, goal_of(case, measured))
                for case in CASES
                if case.name in measured
            ),
            *throughput_kept_rows(measured),
            *planning_rows(),
        ],
        raw={name: asdict(steps) for name, steps in measured.items()},
    )


def goal_of(case: Case, measured: dict[str, Steps]) -> float | None:
    """Minimum speedup of a case; with drafts, that of the same samples without drafts."""
    if not case.drafted:
        return case.goal
    alike = measured.get(replace(case, drafted=0).name)
    return None if alike is None else alike.speedup().median


def throughput_kept_rows(measured: dict[str, Steps]) -> list[Row]:
    """Table rows: throughput kept when a group's prefix grows from 1K to 16K tokens."""
    cases = [Case(num_groups=1, group_size=32, prefix=prefix) for prefix in (1024, LONGEST)]
    if not all(case.name in measured for case in cases):
        return []
    short, long = (measured[case.name] for case in cases)
    what = "throughput retained from a 1K to a 16K prefix, 32 samples"
    medians = [
        ("stock", statistics.median(short.stock) / statistics.median(long.stock)),
        ("shared", statistics.median(short.shared) / statistics.median(long.shared)),
    ]
    return [Row(what=f"{what}, {arm}", value=f"{ratio:.0%}") for arm, ratio in medians]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=4.0, help="per case, after nine rounds")
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--machine", choices=("alone", "shared"), default="alone")
    add_out(parser)
    arguments = parser.parse_args()
    alone = arguments.machine == "alone"
    if arguments.part and started_by_coppice():
        seconds, rounds = arguments.seconds, arguments.rounds
        return measure(arguments.part, alone=alone, seconds=seconds, rounds=rounds)
    if not arguments.merge:
        for part in [arguments.part] if arguments.part else PARTS:
            run_in_subprocess(part)
    if not arguments.part:
        result = record(load_measured(alone), alone=alone)
        result.show()
        print(f"\nwrote {result.write(arguments.out).name}")


def run_in_subprocess(part: str) -> None:
    with (
        tempfile.TemporaryDirectory() as temp_dir,
        engine_environment(EngineSettings(), on_cpu=True, temp_dir=Path(temp_dir)),
    ):
        command = [
            sys.executable,
            "-m",
            "bench.shared_prefix_decode",
            *sys.argv[1:],
            "--part",
            part,
        ]
        if status := os.spawnv(os.P_WAIT, sys.executable, command):
            raise SystemExit(status)


if __name__ == "__main__":
    main()
