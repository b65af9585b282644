"""The driver of the measurements that need a GPU: budget, failures, and continuation."""

import importlib.metadata
import importlib.util
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.evidence.stages import STAGES, TESTS, Measurement, Place
from bench.evidence.stages import read_printed as printed
from bench.evidence.stages import read_report as report
from bench.gpu_evidence import ROOT, Results, main, prepare, run_stage

FOREVER = "import subprocess, sys, time\nprint(1, flush=True)\ntime.sleep(600)\n"
Measure = Callable[[str, str], Measurement]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Makes a measurement of a program, and counts its runs in the file NAME.runs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def made(name: str, program: str) -> Measurement:
        count = f"open({str(tmp_path / name) + '.runs'!r}, 'a').write('x')\n"
        (tmp_path / f"measured_{name}.py").write_text(count + program)
        return Measurement(
            name=name, arguments=lambda _: [f"measured_{name}"], read=printed, seconds=5
        )

    return made


def run(
    tmp_path: Path, *measurements: Measurement, budget: float = 60, **options: Any
) -> dict[str, Any]:
    results = Results.of("A", tmp_path / "out", options.pop("earlier", None))
    until = time.monotonic() + budget
    run_stage(
        measurements,
        results,
        models=tmp_path,
        rehearse=options.pop("rehearse", False),
        until=until,
    )
    found: dict[str, Any] = json.loads(results.file.read_text())["measurements"]
    return found


def num_runs(tmp_path: Path, name: str) -> int:
    file = tmp_path / f"{name}.runs"
    return len(file.read_text()) if file.exists() else 0


def test_results_are_kept_and_not_measured_again(tmp_path: Path, measure: Measure) -> None:
    one = measure("one", "print('log')\nprint('{\"x\": 1}')")
    assert run(tmp_path, one)["one"]["result"] == {"x": 1}
    assert run(tmp_path, one)["one"]["status"] == "done"
    assert num_runs(tmp_path, "one") == 1


def test_results_of_an_earlier_run_count(tmp_path: Path, measure: Measure) -> None:
    one, two = measure("one", "print('{}')"), measure("two", "print('{}')")
    run(tmp_path, one)
    (tmp_path / "out").rename(tmp_path / "before")
    found = run(tmp_path, one, two, earlier=tmp_path / "before")
    assert [found[name]["status"] for name in ("one", "two")] == ["done", "done"]
    assert num_runs(tmp_path, "one") == 1


@pytest.mark.parametrize(
    "program", ["raise SystemExit('no ' + 'luck')", "print('no luck')", "print('no luck', 1 / 0)"]
)
def test_failure_is_recorded_and_repeated_and_the_next_one_runs(
    program: str, tmp_path: Path, measure: Measure
) -> None:
    bad, good = measure("bad", program), measure("good", "print('{}')")
    found = run(tmp_path, bad, good)
    assert (found["bad"]["status"], found["good"]["status"]) == ("failed", "done")
    assert "no luck" in found["bad"]["output"] or "ZeroDivision" in found["bad"]["output"]
    run(tmp_path, bad, good)
    assert (num_runs(tmp_path, "bad"), num_runs(tmp_path, "good")) == (2, 1)


def test_measurement_is_stopped_at_the_end_of_the_budget(tmp_path: Path, measure: Measure) -> None:
    slow = replace(measure("slow", FOREVER), seconds=1)
    began = time.monotonic()
    assert run(tmp_path, slow, budget=4)["slow"]["status"] == "stopped"
    assert time.monotonic() - began < 60
    left = [p for p in psutil.Process().children(recursive=True) if "measured_slow" in cmd(p)]
    assert left == []


def cmd(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def test_measurement_that_does_not_fit_is_not_started(tmp_path: Path, measure: Measure) -> None:
    long = replace(measure("long", "print('{}')"), seconds=100)
    found = run(tmp_path, long, measure("short", "print('{}')"), budget=50)
    assert list(found) == ["short"]
    assert num_runs(tmp_path, "long") == 0


def test_rehearsal_says_why_something_cannot_run(tmp_path: Path, measure: Measure) -> None:
    one = replace(measure("one", "print('{}')"), not_on_cpu="needs a GPU")
    found = run(tmp_path, one, rehearse=True)
    assert found["one"] == {"status": "not possible", "reason": "needs a GPU"}
    assert num_runs(tmp_path, "one") == 0


def test_tests_that_failed_or_were_skipped_are_named(tmp_path: Path) -> None:
    written = {"passed": ["ok"], "failed": {"bad": "assert 1 == 2"}, "skipped": {"no": "no GPU"}}
    (tmp_path / "test_some.json").write_text(json.dumps(written))
    found = report(Place(folder=tmp_path, models=tmp_path, rehearse=False), "")
    assert found == {"passed": 1, "failed": ["bad: assert 1 == 2"], "skipped": ["no: no GPU"]}


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_measurement_names_a_module_and_existing_tests(
    rehearse: bool, tmp_path: Path
) -> None:
    place = Place(folder=tmp_path, models=tmp_path, rehearse=rehearse)
    names = [measurement.name for stage in STAGES.values() for measurement in stage]
    assert len(names) == len(set(names))
    for measurement in (each for stage in STAGES.values() for each in stage):
        module, *arguments = measurement.arguments(place)
        assert importlib.util.find_spec(module) is not None
        tests = [Path(argument) for argument in arguments if argument.startswith("tests/")]
        assert bool(tests) == (module == TESTS)
        assert all((ROOT / file).exists() for file in tests)


def test_every_file_of_gpu_tests_is_run_by_a_stage(tmp_path: Path) -> None:
    place = Place(folder=tmp_path, models=tmp_path, rehearse=False)
    run_files = {
        argument
        for stage in STAGES.values()
        for measurement in stage
        for argument in measurement.arguments(place)
    }
    files = {str(file.relative_to(ROOT)) for file in (ROOT / "tests/gpu").glob("test_*.py")}
    assert files <= run_files


def test_plugin_is_found_where_the_project_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setattr("bench.gpu_evidence.is_plugin_installed", lambda: False)
    prepare(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    points = importlib.metadata.entry_points(group="vllm.general_plugins", name="coppice")
    assert {point.value for point in points} == {"engine.launch.plugin:install"}
    assert str(tmp_path) in os.environ["PYTHONPATH"].split(":")


def test_list_names_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    printed_text = capsys.readouterr().out
    assert all(f"{stage}: " in printed_text for stage in STAGES)


def test_stage_runs_in_a_rehearsal(tmp_path: Path) -> None:
    arguments = ["--rehearse", "--stage", "0", "--out", str(tmp_path), "--models", str(tmp_path)]
    assert main([*arguments, "--budget", "300"]) == 0
    found = json.loads((tmp_path / "rehearsal-0.json").read_text())["measurements"]
    assert found["imports"]["result"]["packages"]["torch"]
    assert all(value > 0 for value in found["bandwidth"]["result"].values())
    assert found["empty-grids"]["status"] == "not possible"
