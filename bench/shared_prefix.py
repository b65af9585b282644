"""Decoding with shared prefixes read once a step, against vLLM's own attention, end to end.

One engine in one process, whose environment is that of the server's EngineCore; see
bench/harness/stepped.py for how its steps are timed.
The model has 25M random parameters: 8 layers, 8 query and 4 KV heads of 64, bfloat16.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.harness.record import Record, Row
from bench.harness.stepped import BLOCK, DRAFTED, LONGEST, Case, Engine, Steps, write_config
from engine.environment import spawning, started_by_coppice
from engine.settings import AttentionSettings, EngineSettings

CASES = (
    Case(num_groups=1, group_size=32, prefix=64, goal=1.03),
    Case(num_groups=1, group_size=32, prefix=1024, goal=1.3),
    Case(num_groups=1, group_size=32, prefix=2048),
    Case(num_groups=1, group_size=32, prefix=4096, goal=1.9),
    Case(num_groups=1, group_size=32, prefix=8192),
    Case(num_groups=1, group_size=32, prefix=16384, goal=3.0),
    Case(num_groups=1, group_size=128, prefix=4096, goal=2.0),
    Case(num_groups=8, group_size=8, prefix=4096, goal=2.08),
    Case(num_groups=64, group_size=8, prefix=512, goal=1.29),
    Case(num_groups=8, group_size=8, prefix=1024, system=1024, goal=1.3),
    Case(num_groups=256, group_size=1, prefix=128, goal=1.0),
)
SPECULATED = Case(num_groups=1, group_size=32, prefix=4096)


def planning_row() -> Row:
    """256 rows of 4096 tokens, as groups of eight behind a prompt of their own."""
    from engine.attention.planner import Planner

    groups, size, shared, own = 32, 8, 127, 3
    ids = np.random.default_rng(0).permutation(groups * (shared + size * own)).astype(np.int32)
    prompts = ids[: groups * shared].reshape(groups, shared).repeat(size, axis=0)
    rows = np.hstack([prompts, ids[groups * shared :].reshape(groups * size, own)])
    table = np.zeros((len(rows), 544), np.int32)
    table[:, : rows.shape[1]] = np.random.default_rng(1).permutation(rows)
    positions = np.full(len(rows), 4096, np.int32)
    anew: list[float] = []
    same: list[float] = []
    kept = Planner(BLOCK)
    for _ in range(200):
        for planner, times in ((Planner(BLOCK), anew), (kept, same)):
            began = time.perf_counter()
            planner.plan(table, positions)
            times.append(1e6 * (time.perf_counter() - began))
    median = statistics.median(anew)
    return Row(
        what="planning 256 rows of 4096 tokens",
        value=f"{median:.0f} us anew, {statistics.median(same):.0f} us when nothing has changed",
        goal="<= 200 us",
        verdict="met" if median <= 200 else "missed",
    )


def measure(seconds: float, rounds: int) -> tuple[dict[str, Steps], Steps]:
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder) / "model")
        engine = Engine(model, Path(folder))
        measured = {}
        for case in CASES:
            measured[case.name] = engine.measure(case, seconds=seconds, rounds=rounds)
            print(measured[case.name].row(case.name, case.goal), flush=True)
        engine.close()
        drafting = {"method": "custom_class", "model": "bench.harness.stepped.Drafts"}
        engine = Engine(
            model, Path(folder), speculative_config=drafting | {"num_speculative_tokens": DRAFTED}
        )
        speculated = engine.measure(SPECULATED, seconds=seconds, rounds=rounds)
        engine.close()
    return measured, speculated


def record(measured: dict[str, Steps], speculated: Steps) -> Record:
    rows = [measured[case.name].row(case.name, case.goal) for case in CASES]
    alike = measured[SPECULATED.name].gain().median
    what = f"{SPECULATED.name}, {1 + DRAFTED} query tokens a sample"
    ends = [
        measured[case.name]
        for case in CASES
        if (case.num_groups, case.group_size) == (1, 32) and case.prefix in (1024, LONGEST)
    ]
    return Record(
        name="shared_prefix",
        claim="Decode steps with shared prefixes read once, against vLLM's own attention over the "
        "same cache: 25M parameters in bfloat16, block size 32.",
        rows=[
            *rows,
            speculated.row(what, alike),
            kept_row("stock", [steps.stock for steps in ends]),
            kept_row("shared", [steps.shared for steps in ends]),
            planning_row(),
        ],
        raw={
            name: {"stock": s.stock, "shared": s.shared, "without": s.without}
            for name, s in (measured | {what: speculated}).items()
        },
    )


def kept_row(arm: str, ends: list[list[float]]) -> Row:
    short, long = map(statistics.median, ends)
    return Row(
        what=f"throughput of 32 samples kept from a 1K to a 16K prefix, {arm}",
        value=f"{100 * short / long:.0f} %",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=4.0, help="a case, once nine rounds ran")
    arguments = parser.parse_args()
    if not started_by_coppice():
        with (
            tempfile.TemporaryDirectory() as scratch,
            spawning(
                EngineSettings(),
                attention=AttentionSettings(),
                on_cpu=True,
                scratch=Path(scratch),
            ),
        ):
            command = [sys.executable, "-m", "bench.shared_prefix", *sys.argv[1:]]
            raise SystemExit(os.spawnv(os.P_WAIT, sys.executable, command))
    result = record(*measure(arguments.seconds, arguments.rounds))
    result.show()
    print(f"\nwrote {result.write().name}")


if __name__ == "__main__":
    main()
