"""Rehearsal of a run on a GPU: every kind of script once, with tiny models on the CPU."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import report
from bench.gpu.attention_cases import variants
from bench.gpu.jobs import wait_for
from bench.gpu.parts import Visit
from bench.gpu.results import Results
from bench.gpu.timers import IN_CORE, IN_SERVICE
from bench.gpu.turns import take_turns
from bench.gpu.workloads import ATTENTION

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rehearsal")
    out = folder / "out"
    out.mkdir()
    visit = Visit(part="a", out=out, work=folder / "work", until=math.inf, rehearse=True)
    visit.run("models", "bench.gpu.models", str(visit.models), seconds=0)
    for name in ("copies", "kernels"):
        visit.run(name, f"bench.gpu.{name}", "--results", str(out / f"{name}.json"), seconds=0)
    arm = visit.arm("auto", "arm-auto", seconds=0)
    take_turns([arm], rounds=1, start_until=math.inf, until=math.inf, batch_seconds=math.inf)
    arm.job.close_input()
    wait_for([arm.job])
    visit.write()
    report.write(out, 2)
    logs = {name: (out / f"{name}.log").read_text() for name in visit.jobs}
    assert not any(job.has_failed for job in visit.jobs.values()), logs
    return out


def test_kernels_and_copies_are_measured(out: Path) -> None:
    kernels, copies = (
        json.loads((out / f"{name}.json").read_text()) for name in ("kernels", "copies")
    )
    assert "not on a CPU" in kernels["not possible"] and "not on a CPU" in copies["not possible"]
    num_times = sum(5 if variant.batch.rows > 1 else 2 for variant in variants())
    assert len(kernels["times"]) == num_times
    assert all(value > 0 for name, value in copies.items() if name != "not possible")


def test_engine_runs_its_batches_and_every_process_is_timed(out: Path) -> None:
    results = Results(out)
    lines = results.lines("arm-auto.jsonl")
    assert [line["batch"] for line in lines] == ["start", *ATTENTION, *ATTENTION, "end"]
    assert lines[-1]["counters"]["attention"]
    [run] = results.batches("auto", ATTENTION[1])
    names = {target.partition(":")[2] for target in (*IN_CORE, *IN_SERVICE)} - {"load", "read_view"}
    assert run["timers"].keys() == names
    assert run["timers"]["Scheduler.schedule"]["calls"] >= run["tokens"] / 8


def test_report_has_the_processes_and_decides_nothing(out: Path) -> None:
    record: dict[str, Any] = json.loads((out / "run-2.json").read_text())
    assert {each["answer"] for each in record["figures"]} == {"not measured"}
    assert "not on a CPU (16x16@1024: " in record["figures"][0]["figure"]
    assert "| arm-auto | done |" in (out / "report.md").read_text()
