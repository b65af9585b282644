"""Decisions and record of a run on a GPU, from results that are written here."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import report
from bench.gpu.jobs import write_json
from bench.report import gpu_runs

H100 = {
    "date": "2026-01-02",
    "machine": {"gpus": ["NVIDIA H100 80GB HBM3, 580.1"]},
    "versions": {"torch": "2.13.0"},
}
STEP = "EngineCoreProc._process_engine_step"


def write_lines(file: Path, *lines: dict[str, Any]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def kernel(arm: str, batch: str, us: float, **options: Any) -> dict[str, Any]:
    variant = {"heads": [16, 8], "block_size": 16, "layout": "NHD", "num_splits": 0}
    return variant | {"arm": arm, "batch": batch, "flushed": True, "us": [us, 2 * us]} | options


def arm(seconds: float, batch: str, *, tokens: int = 1000) -> list[dict[str, Any]]:
    """A warm-up that is much slower, and two runs."""
    runs = [10 * seconds, seconds, seconds]
    return [
        {"batch": batch, "seconds": each, "tokens": tokens, "timers_before": {}} for each in runs
    ]


def decisions(folder: Path, run: int = 2) -> dict[str, tuple[str, str]]:
    report.write(folder, run)
    record = json.loads((folder / f"run-{run}.json").read_text())
    return {each["question"]: (each["answer"], each["figure"]) for each in record["figures"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_json(tmp_path / "environment.json", H100)
    return tmp_path


def test_nothing_is_decided_without_results(folder: Path) -> None:
    answers = decisions(folder)
    assert len(answers) == 10
    assert set(answers.values()) == {("not measured", "nothing")}


@pytest.mark.parametrize(("us", "answer"), [(55.0, "yes"), (65.0, "no")])
def test_kernel_decides_by_both_lengths(us: float, answer: str, folder: Path) -> None:
    times = [
        kernel("stock", "16x16@1024", 100.0),
        kernel("stock", "16x16@1024", 1.0, flushed=False),
        kernel("shared", "16x16@1024", us),
        kernel("stock", "16x16@4096", 100.0),
    ]
    write_json(folder / "kernels.json", {"times": times})
    question = "Is sharing worth it in the kernel?"
    partial = "no" if answer == "no" else "not measured"
    assert decisions(folder)[question][0] == partial
    times.append(kernel("shared", "16x16@4096", 20.0))
    write_json(folder / "kernels.json", {"times": times})
    found, figure = decisions(folder)[question]
    assert found == answer
    assert figure == f"16x16@1024: {us / 100:.3g}; 16x16@4096: 0.2"


def test_end_to_end_compares_pairs_without_the_warm_up(folder: Path) -> None:
    for mode, seconds in (("off", 3.0), ("always", 1.0), ("auto", 1.01)):
        lines = [run for batch in ("16x16@1024", "16x16@4096") for run in arm(seconds, batch)]
        write_lines(folder / f"arm-{mode}.jsonl", {"batch": "start"}, *lines, {"batch": "end"})
    answers = decisions(folder)
    answer, figure = answers["Is sharing worth it end to end?"]
    assert answer == "yes" and "3.00 [3.00, 3.00]" in figure
    answer, figure = answers["Does auto choose well?"]
    assert answer == "not measured" and "0.99" in figure, "two shapes were not run"


def test_host_step_is_fitted_to_the_steps_that_were_counted(folder: Path) -> None:
    lines: list[dict[str, Any]] = [{"batch": "start"}]
    steps = 0
    for rows in (16, 64, 256):
        for seconds in (9.0, 100 * (0.003 + 35e-6 * rows)):
            before = {STEP: {"calls": steps, "seconds": 0, "cpu_seconds": 0}}
            steps += 100
            run = {"seconds": seconds, "tokens": 1, "timers_before": before}
            lines.append({"batch": f"host {rows}"} | run)
    end = {
        "batch": "end",
        "timers_before": {STEP: {"calls": steps, "seconds": 0, "cpu_seconds": 0}},
    }
    write_lines(folder / "arm-host.jsonl", *lines, end)
    assert decisions(folder)["Is the host the limit, as modeled?"] == ("yes", "a, ms: 3; b, us: 35")


def test_pause_and_copies(folder: Path) -> None:
    pauses = [{"kind": "files", "pause": seconds} for seconds in (4.0, 2.0, 2.2)]
    write_lines(folder / "pause.jsonl", {"kind": "start"}, *pauses, {"kind": "ipc", "pause": 0.1})
    rates = {"pinned memory": 50.0, "registered file": 49.0}
    copies = {f"{name}, pieces of 64 MiB, GB/s": rate for name, rate in rates.items()}
    within = {"bytes": 16.4e9, "within the GPU, foreach, GB/s": 1300.0}
    write_json(folder / "copies.json", copies | within)
    answers = decisions(folder)
    assert answers["Is the pause of a publication too long?"][0] == "yes"
    assert answers["Does a pinned arena pay?"][0] == "yes"


def test_graphs_are_counted_in_the_log(folder: Path) -> None:
    bars = [
        f"Capturing CUDA graphs ({kind}): {n}/35" for kind in ("PIECEWISE", "FULL") for n in (1, 35)
    ]
    facts = {"arm-off": [*bars, "Graph capturing finished in 5 secs, took 0.70 GiB"]}
    write_json(folder / "facts.json", facts)
    assert decisions(folder)["Can twelve more graphs be afforded?"] == ("yes", "MB per graph: 10.7")


def test_rehearsal_decides_nothing_and_shows_its_figures(tmp_path: Path) -> None:
    write_json(tmp_path / "environment.json", {"machine": {}})
    write_json(tmp_path / "jobs-b.json", {"arm-off": {"status": "done", "seconds": 1}})
    times = [kernel(name, "16x16@1024", 1.0) for name in ("stock", "shared")]
    write_json(tmp_path / "kernels.json", {"times": times})
    answer, figure = decisions(tmp_path)["Is sharing worth it in the kernel?"]
    assert (answer, figure) == ("not measured", "not on a CPU (16x16@1024: 1)")
    record = json.loads((tmp_path / "run-2.json").read_text())
    assert {each["status"] for each in record["capabilities"].values()} == {"not run"}


def test_record_has_the_tests_and_what_they_show(folder: Path) -> None:
    (folder / "tests").mkdir()
    tests = {
        "file": "tests/gpu/test_graphs.py",
        "passed": ["a"],
        "failed": {"b": ""},
        "skipped": {},
    }
    write_json(folder / "tests" / "test_graphs.json", tests)
    jobs = {name: {"status": "done", "seconds": 1.0} for name in ("arm-off", "arm-host")}
    write_json(folder / "jobs-b.json", jobs | {"tests-graphs": {"status": "failed", "seconds": 1}})
    report.write(folder, 7, "1234abcd")
    record = json.loads((folder / "run-7.json").read_text())
    assert (record["run"], record["gpu"]) == (7, "H100 80GB HBM3")
    assert record["commit"] == "1234abcd"
    assert record["versions"] == {"torch": "2.13.0", "driver": "580.1"}
    counts = {"passed": 1, "failed": 1, "skipped": 0}
    assert record["tests"] == {"tests/gpu/test_graphs.py": counts}
    graphs = {"status": "failed", "what": "1 of 2 tests of test_graphs"}
    assert record["capabilities"]["cuda-graphs"] == graphs
    assert record["capabilities"]["group"]["status"] == "ran"
    skipped = {each: {"passed": 0, "failed": 0, "skipped": 1} for each in record["tests"]}
    jobs = {"tests-graphs": {"status": "done", "seconds": 1.0}}
    assert report.capabilities(True, jobs, skipped)["cuda-graphs"]["status"] == "not run"
    assert record["capabilities"]["trees"] == {"status": "not run", "what": ""}


def test_page_has_the_figures_of_runs_that_have_some(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_runs, "FOLDER", folder)
    write_json(folder / "run-1.json", {"run": 1, "figures": []})
    assert gpu_runs.section() == ""
    decisions(folder)
    assert (
        "### Run 2\n\nH100 80GB HBM3, 2026-01-02, torch 2.13.0, driver 580.1." in gpu_runs.section()
    )
    assert "Run 1" not in gpu_runs.section()
