"""Siblings' drafts and their controller against no drafts, vLLM's ngram, Arctic's suffix decoding
and every fixed length, end to end.

Each arm is an engine in a process of its own, with the environment of the server's EngineCore; they
take turns at one workload after another. The seedling is grown to what its steps are to cost: its
responses stay its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness.drafting import BUCKETS, LONGEST, Workload
from bench.harness.pairs import Pairs
from bench.harness.record import Record, Row
from bench.harness.stepped import write_config
from engine.environment import spawning
from engine.settings import AttentionSettings, EngineSettings

Run = dict[str, Any]
FIXED = tuple(f"fixed-{length}" for length in (1, 2, 4, LONGEST))
GUARD_GOAL = 0.97


@contextmanager
def arm(name: str, model: Path, cache: Path, arctic: str | None) -> Iterator["ArmProcess"]:
    with (
        tempfile.TemporaryDirectory() as scratch,
        spawning(
            EngineSettings(),
            attention=AttentionSettings(),
            on_cpu=True,
            scratch=Path(scratch),
        ),
    ):
        environment = os.environ | {
            "VLLM_PLUGINS": "",
            # Not the engine's own OpenMP, from which numba would start threads of its own.
            "NUMBA_THREADING_LAYER": "workqueue",
            "PYTHONPATH": os.pathsep.join(
                filter(None, [arctic if name == "suffix" else None, os.environ.get("PYTHONPATH")])
            ),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.harness.drafting", name, str(model), str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
    try:
        yield ArmProcess(process)
    finally:
        process.kill()
        process.wait()


class ArmProcess:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.runs: list[Run] = []

    def run(self, work: Workload | None) -> None:
        """None: waits until it is ready."""
        assert self._process.stdin and self._process.stdout
        if work is not None:
            self._process.stdin.write(json.dumps(asdict(work)) + "\n")
            self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith(("{", '"ready"')):
            assert line, "the arm died"
        if work is not None:
            self.runs.append(json.loads(line))


def measured(
    names: Sequence[str],
    model: Path,
    works: Sequence[Workload],
    *,
    cache: Path,
    arctic: str | None,
) -> dict[str, list[Run]]:
    """The first workload warms up."""
    with ExitStack() as stack:
        arms: dict[str, ArmProcess] = {}
        # Ours measures what its steps cost when it starts, and has to be alone for that.
        for together in (["ours"], [name for name in names if name != "ours"]):
            begun = {n: stack.enter_context(arm(n, model, cache, arctic)) for n in together}
            for one in begun.values():
                one.run(None)
            arms |= begun
        for number, work in enumerate(works):
            for one in list(arms.values())[:: 1 if number % 2 else -1]:
                one.run(work)
    return {name: one.runs[1:] for name, one in arms.items()}


def rates(runs: Sequence[Run], bucket: int | None = None) -> list[float]:
    """Tokens a second, of steps of that many running samples or fewer."""
    if bucket is None:
        return [run["tokens"] / run["seconds"] for run in runs]
    at = [str(most) for most in BUCKETS if most <= bucket]
    return [
        sum(run["tokens_at"].get(b, 0) for b in at)
        / max(sum(run["seconds_at"].get(b, 0) for b in at), 1e-9)
        for run in runs
    ]


def row(what: str, ours: Sequence[Run], other: Sequence[Run], goal: float | None = None) -> Row:
    ratio = Pairs(a=rates(ours), b=rates(other)).ratio()
    few = ""
    if all(a > 0 and b > 0 for a, b in zip(rates(ours, 8), rates(other, 8), strict=True)):
        tail = Pairs(a=rates(ours, 8), b=rates(other, 8)).ratio()
        few = f"; at 8 or fewer running {tail.median:.2f}x"
    return Row(
        what=what,
        value=f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}] tokens a second{few}",
        goal=f">= {goal:.2f}x" if goal else "",
        verdict=ratio.verdict(goal) if goal else "",
    )


def described(name: str, runs: Sequence[Run]) -> Row:
    steps = {b: sum(run["steps_at"].get(str(b), 0) for run in runs) for b in BUCKETS}
    num_steps, tokens = sum(steps.values()), sum(run["tokens"] for run in runs)
    drafted, accepted = (sum(run[kind] for run in runs) for kind in ("drafted", "accepted"))
    took = f", {100 * accepted / drafted:.0f} % of {drafted} drafted accepted" if drafted else ""
    running = ", ".join(f"<= {b}: {100 * n / num_steps:.0f} %" for b, n in steps.items())
    return Row(
        what=f"{name}: {len(runs)} runs",
        value=f"{statistics.median(rates(runs)):.0f} tokens a second, {tokens} tokens in "
        f"{num_steps} steps{took}; steps by running samples {running}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["workload", "guard"])
    parser.add_argument("model", type=Path, help="the seedling, grown")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", nargs="*", default=["off", "ours", "ngram", "suffix", *FIXED])
    parser.add_argument("--arctic", help="where arctic-inference is installed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.part == "guard":
            model = write_config(Path(folder) / "model")
            names = ["off", "ours"]
            works = [
                Workload(seed=n, temperature=1.0, max_tokens=64, ignore_eos=True)
                for n in range(1 + options.rounds)
            ]
        else:
            model, names = options.model, options.arms
            works = [
                Workload(seed=n, temperature=options.temperature) for n in range(1 + options.rounds)
            ]
        runs = measured(names, model, works, cache=Path(folder) / "kept", arctic=options.arctic)
    result = record(options.part, options.model.name, options.temperature, runs)
    result.show()
    print(f"\nwrote {result.write().name}")


def record(part: str, model: str, temperature: float, runs: dict[str, list[Run]]) -> Record:
    rows = [described(name, came) for name, came in runs.items()]
    if part == "guard":
        rows.append(row("ours over off", runs["ours"], runs["off"], GUARD_GOAL))
        claim = "64 samples of a model of random weights, 25M parameters in bfloat16, whose text "
        claim += "nothing foretells: drafts and their controller against no drafts."
        return Record(
            name="speculation_guard", bench="speculation", claim=claim, rows=rows, raw=runs
        )
    rows += [row(f"ours over {n}", runs["ours"], came) for n, came in runs.items() if n != "ours"]
    claim = f"Eight groups of eight, up to 512 tokens, at temperature {temperature}; {model}, the "
    others = ", ".join(name for name in runs if name != "ours")
    claim += f"grown seedling in bfloat16: siblings' drafts and their controller against {others}."
    name = f"speculation_{temperature:.1f}".replace(".", "_")
    return Record(name=name, bench="speculation", claim=claim, rows=rows, raw=runs)


if __name__ == "__main__":
    main()
