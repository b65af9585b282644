"""Processes of a run on a GPU host: limits, failures, turns, and timers inside of them."""

import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.gpu import timers, turns
from bench.gpu.jobs import Job, wait_for
from bench.gpu.turns import Arm, read_lines, take_turns

pytestmark = pytest.mark.slow

SLEEP = "import subprocess, sys, time\n"
ARM = """
import json, sys, time
def add(**values):
    with open({file!r}, "a") as file:
        file.write(json.dumps(values) + "\\n")
add(batch="start")
while name := sys.stdin.readline().strip():
    {body}
    add(batch=name, at=time.monotonic())
add(batch="end")
"""
Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts a program as a module."""

    def started(name: str, program: str, *, seconds: float = 60.0) -> Job:
        (tmp_path / f"module_{name}.py").write_text(program)
        until = time.monotonic() + 120
        variables = {"PYTHONPATH": str(tmp_path)}
        return Job.start(
            name,
            [f"module_{name}"],
            out=tmp_path,
            until=until,
            seconds=seconds,
            environment=variables,
        )

    return started


def test_jobs_end_with_their_status_and_one_that_fails_stops_no_other(start: Start) -> None:
    jobs = [start("bad", "raise SystemExit('no luck')"), start("good", "print('done')")]
    wait_for(jobs)
    assert [job.result and job.result["status"] for job in jobs] == ["failed", "done"]
    assert [job.has_failed for job in jobs] == [True, False]


def test_job_is_stopped_at_its_deadline_with_its_children(start: Start, tmp_path: Path) -> None:
    child = "import time, pathlib; pathlib.Path({!r}).touch(); time.sleep(600)"
    ready = tmp_path / "ready"
    command = f"[sys.executable, '-c', {child.format(str(ready))!r}]"
    program = f"subprocess.Popen({command}, start_new_session=True)\ntime.sleep(600)"
    job = start("slow", SLEEP + program, seconds=600)
    while not ready.exists():
        time.sleep(0.05)
    children = psutil.Process(job.process.pid).children(recursive=True)
    assert not job.poll()
    job.deadline = time.monotonic()
    wait_for([job])
    assert job.result is not None and job.result["status"] == "stopped"
    assert children and not psutil.wait_procs(children, timeout=60)[1]


def test_input_is_a_list_of_commands(start: Start, tmp_path: Path) -> None:
    job = start("echo", "import sys\nfor line in sys.stdin: print(line.strip())")
    job.send("one")
    job.send("two")
    job.close_input()
    wait_for([job])
    job.send("lost")
    assert (tmp_path / "echo.log").read_text().split() == ["one", "two"]


@pytest.fixture
def arm(start: Start, tmp_path: Path) -> Callable[..., Arm]:
    def started(mode: str, body: str = "pass") -> Arm:
        file = tmp_path / f"arm-{mode}.jsonl"
        job = start(mode, ARM.format(file=str(file), body=body))
        return Arm(mode=mode, job=job, file=file)

    return started


def run(arms: list[Arm], *, seconds: float = 60.0, batch_seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    take_turns(arms, rounds=2, start_until=end, until=end, batch_seconds=batch_seconds)
    for each in arms:
        each.job.close_input()
    wait_for(each.job for each in arms)


@pytest.fixture(autouse=True)
def batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "BATCHES", {"off": ("a", "b"), "always": ("a",), "auto": ("a",)})


def test_arms_take_turns_and_every_second_round_is_in_reverse(arm: Callable[..., Arm]) -> None:
    arms = [arm("off"), arm("always")]
    run(arms)
    lines = [
        (line["at"], each.mode, line["batch"])
        for each in arms
        for line in read_lines(each.file)
        if "at" in line
    ]
    first, second = [("off", "a"), ("always", "a"), ("off", "b")], [("always", "a"), ("off", "a")]
    assert [each for _, *each in sorted(lines)] == list(
        map(list, [*first, *second, ("off", "b"), *first])
    )
    assert all(read_lines(each.file)[-1] == {"batch": "end"} for each in arms)


@pytest.mark.parametrize("body", ["raise SystemExit(1)", "time.sleep(600)"])
def test_arm_that_fails_or_hangs_does_not_stop_the_others(
    body: str, arm: Callable[..., Arm]
) -> None:
    bad, good = arm("off", body), arm("always")
    run([bad, good], batch_seconds=2)
    assert [line["batch"] for line in read_lines(good.file)] == ["start", "a", "a", "a", "end"]
    assert bad.job.result is not None and bad.job.result["status"] in ("failed", "stopped")


def test_no_batch_begins_after_the_end_of_the_turns(arm: Callable[..., Arm]) -> None:
    arms = [arm("off")]
    arms[0].wait(1, time.monotonic() + 60)
    run(arms, seconds=0)
    assert [line["batch"] for line in read_lines(arms[0].file)] == ["start", "end"]


def test_line_that_is_not_complete_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "results"
    assert read_lines(file) == []
    file.write_text('{"batch": "start"}\n{"bat')
    assert read_lines(file) == [{"batch": "start"}]


class Clocked:
    def double(self, number: int) -> int:
        return 2 * number

    def fail(self) -> None:
        raise ValueError("no luck")


def test_calls_are_timed_and_behave_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: dict[str, timers.Sums] = {}
    for name in ("double", "fail"):
        monkeypatch.setattr(Clocked, name, getattr(Clocked, name))  # restores it afterwards
        timers.time_calls(f"{__name__}:Clocked.{name}", sums)
    assert [Clocked().double(number) for number in (1, 2)] == [2, 4]
    with pytest.raises(ValueError, match="no luck"):
        Clocked().fail()
    assert (sums["Clocked.double"].calls, sums["Clocked.fail"].calls) == (2, 1)
    assert sums["Clocked.double"].seconds > 0


def test_every_timed_function_exists() -> None:
    for target in (*timers.IN_CORE, *timers.IN_SERVICE):
        module, _, path = target.partition(":")
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        assert callable(found)


def test_sums_of_processes_are_added_and_compared(tmp_path: Path) -> None:
    one = {"calls": 1, "seconds": 0.5, "cpu_seconds": 0.25}
    for process in (1, 2):
        content = {"process": "x", "written": time.monotonic(), "sums": {"f": one}}
        (tmp_path / f"{process}.json").write_text(json.dumps(content))
    total = timers.read_sums(tmp_path, since=0.0)
    assert total == {"f": {"calls": 2, "seconds": 1.0, "cpu_seconds": 0.5}}
    assert timers.differences(total, {"f": one}) == {"f": one}
    assert timers.differences(total, total) == {}
