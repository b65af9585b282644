"""The runner of the GPU tests, on files of other tests."""

import json
from pathlib import Path

import psutil
import pytest

from tests.gpu.runner import Result, all_files, main, run, table

pytestmark = pytest.mark.slow

MIXED = """
import pytest
@pytest.mark.gpu
def test_good(): pass
@pytest.mark.engine
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="no GPU")
def test_skipped(): pass
@pytest.fixture
def broken():
    yield
    raise ValueError("left")
def test_broken_teardown(broken): pass
"""
ENDING = """
import os
def test_first(): pass
def test_ending(): os._exit({status})
def test_last(): pass
"""


def run_file(tmp_path: Path, text: str, seconds: float = 120) -> Result:
    file = tmp_path / "test_some.py"
    file.write_text(text)
    [result] = run([str(file)], out=tmp_path / "out", rehearse=False, seconds=seconds)
    written = json.loads((tmp_path / "out" / "test_some.json").read_text())
    assert written["failed"] == result.failed and (tmp_path / "out" / "test_some.log").exists()
    return result


def names(tests: object) -> set[str]:
    assert isinstance(tests, tuple | dict)
    return {test.rpartition("::")[2] for test in tests}


def test_outcomes_are_those_of_pytest(tmp_path: Path) -> None:
    result = run_file(tmp_path, MIXED)
    assert names(result.passed) == {"test_good"}
    assert names(result.failed) == {"test_bad", "test_broken_teardown"}
    assert "assert 1 == 2" in "".join(result.failed.values())
    assert list(result.skipped.values()) == ["Skipped: no GPU"]
    assert table([result]).endswith("\n1 passed, 2 failed")


@pytest.mark.parametrize("status", [0, 1])
def test_tests_without_a_result_have_failed(tmp_path: Path, status: int) -> None:
    result = run_file(tmp_path, ENDING.format(status=status))
    assert names(result.passed) == {"test_first"}
    assert names(result.failed) == {"test_ending", "test_last"}


@pytest.mark.parametrize(
    "text",
    [
        "import os; os._exit(0)",
        "raise SystemExit(1)",
        "import no_such_module",
        "",
        "import atexit, os; atexit.register(os._exit, 3)\ndef test_good(): pass",
    ],
)
def test_file_fails_whose_process_ends_otherwise(tmp_path: Path, text: str) -> None:
    result = run_file(tmp_path, text)
    assert len(result.failed) == 1
    assert table([result]).endswith(f"{len(result.passed)} passed, 1 failed")


def test_file_is_stopped_with_its_processes_at_the_limit(tmp_path: Path) -> None:
    text = f"""
import subprocess
def test_slow():
    subprocess.run(["tail", "-f", "/dev/null", "{tmp_path / "left"}"])
"""
    (tmp_path / "left").touch()
    result = run_file(tmp_path, text, seconds=15)
    [reason] = result.failed.values()
    assert reason.endswith("stopped after 15 s") and not result.passed
    assert [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path / "left") in cmd(p)] == []


def cmd(process: psutil.Process) -> list[str]:
    found: list[str] | None = process.info["cmdline"]  # none for a process that has ended
    return found or []


def test_every_file_runs_by_default_but_not_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "tests/gpu/test_graphs.py" in all_files()
    monkeypatch.setattr("tests.gpu.runner.ON_GPU", False)
    with pytest.raises(SystemExit):
        main([])
    assert "there is no GPU" in capsys.readouterr().err


def test_modules_that_a_gpu_host_lacks_are_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hypothesis", "xdist"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not there')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [result] = run(["tests/gpu/test_kernels.py"], out=tmp_path, rehearse=True, seconds=300)
    assert result.failed == {}
    assert names(result.passed) == {"test_prediction_equals_the_reference"}
