"""Benchmark: time of a training step on a group if its prompt is computed only once.

Compared with rows that repeat the prompt, and with PrefixGrouper.

    python -m bench.trainer_step [--parts time handle memory] [--shapes ...] [--dtypes ...]

A full run takes over an hour. Cells that are not measured again are kept from the existing record
if it has the same machine and versions; the raw results say when each cell was measured.
`--machine shared` is for a machine with other work, `--machine gpu` for a GPU; each has its own
record.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.harness.paired_runs import Pairs
from bench.harness.record import Record, Row, add_out, environment
from bench.optimizer_step.cells import DTYPES, GPU_SHAPES, SHAPES, VOCABULARIES, Cell

NAME = "trainer_step"
PARTS = ("time", "handle", "memory")
ARMS = ("naive", "public", "kept", "recomputed", "single", "given", "injected", "packed")
SCHEDULES = ("kept", "recomputed", "single", "injected", "packed")
MEMORY_SHARE = 1.10
Cells = dict[str, dict[str, Any]]
"""Results by part of the benchmark and cell of its grid."""

MACHINES = {
    "idle": "two pinned threads",
    "shared": "one thread on a machine with other work, its processor time",
    "gpu": "one GPU",
}

# Pinned threads, and huge pages that are kept when freed. Otherwise the kernel's work
# would be part of the measurement.
PINNED = {
    "OMP_PROC_BIND": "true",
    "OMP_PLACES": "{0},{1}",
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
# Return freed memory at once, so that a peak counts tensors and not malloc's free lists.
MALLOC_TRIM = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


def run_worker(*arguments: str, **environment: str) -> Iterator[dict[str, Any]]:
    """Run the measuring process, and yield its result for each cell of the grid."""
    command = [sys.executable, "-m", "bench.optimizer_step.worker", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | environment
    ) as worker:
        assert worker.stdout
        for line in worker.stdout:
            yield json.loads(line)
    if worker.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {worker.returncode}")


def timed(
    machine: str, part: str, cells: Iterable[Cell], rounds: int
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    pinned = {} if machine == "shared" else PINNED
    for result in run_worker(machine, part, str(rounds), *map(str, cells), **pinned):
        yield Cell.of(result["cell"]), result


def peaks(machine: str, cells: Iterable[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Measure the peak memory of training steps, each kind of step in a fresh process."""
    for cell in cells:
        results = {
            arm: next(run_worker(machine, "peak", arm, str(cell), **MALLOC_TRIM)) for arm in ARMS
        }
        found = {arm: result["mib"] for arm, result in results.items()}
        yield cell, {"cell": str(cell), "mib": found}


def time_rows(cell: Cell, result: dict[str, Any]) -> list[Row]:
    seconds = result["seconds"]
    naive = Pairs(a=seconds["naive"], b=seconds["ours"]).ratio()
    public = Pairs(a=seconds["public"], b=seconds["ours"]).ratio()
    ours = statistics.median(seconds["ours"])
    return [
        Row(
            what=f"{_title(cell)}: repeated rows, micro-batches of {result['micro_batch']} / ours",
            value=f"{naive.median:.2f} [{naive.low:.2f}, {naive.high:.2f}], ours {ours:.2f} s"
            + (f", Castform publishes {cell.published}" if cell.published else ""),
            goal=f">= {cell.goal}" if cell.goal else "",
            verdict=naive.verdict(cell.goal) if cell.goal else "",
        ),
        Row(
            what=f"{_title(cell)}: PrefixGrouper / ours",
            value=f"{public.median:.2f} [{public.low:.2f}, {public.high:.2f}]",
            goal=">= 1.0",
            verdict=public.verdict(1.0),
        ),
    ]


def handle_rows(cell: Cell, result: dict[str, Any]) -> list[Row]:
    seconds = result["seconds"]
    rows = []
    for what, name in (("update", "update"), ("old logprobs without gradient", "logprobs")):
        ratio = Pairs(a=seconds[name], b=seconds[f"{name}_given"]).ratio()
        with_it = statistics.median(seconds[f"{name}_given"])
        rows.append(
            Row(
                what=f"{_title(cell)}: {what}, prompt prefilled / prompt KV given",
                value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}],"
                f" given {with_it:.2f} s",
            )
        )
    return rows


def memory_rows(cell: Cell, result: dict[str, Any]) -> list[Row]:
    mib = result["mib"]
    least = min(mib[schedule] for schedule in SCHEDULES)
    names = {
        "naive": "one repeated row",
        "public": "PrefixGrouper",
        "single": "recomputed with one response per pass",
        "given": "prompt KV given",
    }
    return [
        Row(
            what=f"{_title(cell)}: peak memory over weights and gradients, MiB",
            value=", ".join(f"{names.get(arm, arm)} {value:,.0f}" for arm, value in mib.items()),
            goal=f"a schedule <= {MEMORY_SHARE:.2f} of one row",
            verdict="met" if least <= MEMORY_SHARE * mib["naive"] else "missed",
        )
    ]


def record(measured: Cells, machine: str = "idle") -> Record:
    makers = {"time": time_rows, "handle": handle_rows, "memory": memory_rows}
    rows = [
        row
        for part in PARTS
        for text in sorted(measured.get(part, {}), key=_place)
        for row in makers[part](Cell.of(text), measured[part][text])
    ]
    return Record(
        name=_name(machine),
        bench=NAME,
        claim=f"One optimiser step of a 25M-parameter Qwen3 on one group, {MACHINES[machine]}: "
        "time of each baseline divided by that of coppice.train. Repeated rows are causal SDPA on "
        "rows that each repeat the prompt, at their fastest micro-batch size; one micro-batch is "
        "timed and multiplied. PrefixGrouper uses SDPA too. All compute logits of response tokens "
        "only. The output head is tied to the embedding. Peaks count live "
        "tensors; freed memory is returned at once.",
        rows=rows,
        raw={"measured": measured},
    )


def earlier(machine: str, directory: Path) -> Cells:
    """Results of the existing record, or nothing if machine or versions differ."""
    path = directory / f"{_name(machine)}.json"
    if not path.exists():
        return {}
    there, here = json.loads(path.read_text()), environment(NAME)
    if any(there[what] != here[what] for what in ("machine", "versions")):
        return {}
    cells: Cells = there["raw"]["measured"]
    return cells


def _name(machine: str) -> str:
    return NAME if machine == "idle" else f"{NAME}_{machine}"


def _title(cell: Cell) -> str:
    prompt_response, _, samples = cell.shape.partition("x")
    return f"{prompt_response}, G={samples}, {cell.dtype}, vocabulary {cell.vocabulary}"


def _place(text: str) -> tuple[int, int, int]:
    cell = Cell.of(text)
    return (
        VOCABULARIES.index(cell.vocabulary),
        DTYPES.index(cell.dtype),
        (*SHAPES, *GPU_SHAPES).index(cell.shape),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--machine", choices=tuple(MACHINES), default="idle")
    parser.add_argument("--shapes", nargs="+", help="default: those of --machine")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--vocabularies", nargs="+", type=int, default=VOCABULARIES)
    parser.add_argument("--rounds", type=int, default=5)
    add_out(parser)
    options = parser.parse_args()
    shapes = options.shapes or (tuple(GPU_SHAPES) if options.machine == "gpu" else SHAPES)
    cells = [
        Cell.of(f"{shape},{dtype},{vocabulary}")
        for vocabulary in options.vocabularies
        for dtype in options.dtypes
        for shape in shapes
    ]
    for part in options.parts:
        if part == "memory":
            results = peaks(options.machine, cells)
        else:
            results = timed(options.machine, part, cells, options.rounds)
        for cell, result in results:
            stamp = {"date": datetime.now(UTC).date().isoformat(), "rounds": options.rounds}
            measured = earlier(options.machine, options.out)
            measured.setdefault(part, {})[str(cell)] = result | stamp
            print(part, json.dumps(result), file=sys.stderr, flush=True)
            record(measured, options.machine).write(options.out)
    record(earlier(options.machine, options.out), options.machine).show()


if __name__ == "__main__":
    main()
