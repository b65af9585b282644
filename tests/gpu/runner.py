"""GPU tests, each file in a process of its own.

    python -m tests.gpu [--rehearse] [--out DIRECTORY] [--seconds N] [FILE ...]

Tests need pytest and pytest-asyncio only. A process that ends without a complete report has failed,
with each of its tests that has no result: FlashAttention ends its process if it lacks a kernel.
Results are written to DIRECTORY at once, as NAME.json with the log NAME.log.

With `--rehearse` the tests run on a CPU, except those that need

| test | needs |
|---|---|
| `test_graphs` | CUDA graphs |
| `test_kernels`, but predictions | Triton, which compiles for GPUs only |
| `test_kv_transfer`, those without an engine | CUDA streams, pinned memory and IPC |
| `test_shared_prefix` | FlashAttention |
| `test_speculation`, siblings | Model Runner V2 |
| `test_weight_transfer` | CUDA IPC |
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.gpu.device import ON_GPU, REHEARSE
from tests.gpu.report import REPORT

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = "tests/gpu"
# Without tests/conftest.py, which needs hypothesis and xdist. Warnings depend on the host.
PYTEST: Final = (
    *("-c", "pyproject.toml", "--rootdir", ".", "--confcutdir", FOLDER),
    *("-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "tests.gpu.report"),
    *("-W", "default", "-v"),
)
ENVIRONMENT: Final = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
REASON_CHARACTERS: Final = 4000
SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Tests of a file by outcome; `failed` and `skipped` have their reasons."""

    file: str
    passed: tuple[str, ...]
    failed: dict[str, str]
    skipped: dict[str, str]
    seconds: float


def all_files() -> list[str]:
    return sorted(str(file.relative_to(ROOT)) for file in (ROOT / FOLDER).glob("test_*.py"))


def run(files: Iterable[str], *, out: Path, rehearse: bool, seconds: float) -> list[Result]:
    """Run files one after another, each for at most these seconds.

    Results are written to `out` at once.
    """
    out.mkdir(parents=True, exist_ok=True)
    return [_run_file(file, out.resolve(), rehearse=rehearse, seconds=seconds) for file in files]


def _run_file(file: str, out: Path, *, rehearse: bool, seconds: float) -> Result:
    log, result_file = (out / f"{Path(file).stem}{suffix}" for suffix in (".log", ".json"))
    result_file.unlink(missing_ok=True)
    began = time.monotonic()
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as report:
        environment = os.environ | ENVIRONMENT | {REPORT: report.name}
        if rehearse:
            environment[REHEARSE] = "1"
        command = [sys.executable, "-m", "pytest", *PYTEST, file]
        failure = _execute(command, environment, log, seconds)
        entries = [json.loads(line) for line in report if line.endswith("\n")]
    result = result_of(file, entries, failure, time.monotonic() - began)
    result_file.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return result


def _execute(command: Sequence[str], environment: dict[str, str], log: Path, seconds: float) -> str:
    """Run a process in a group of its own, which is killed afterwards.

    Returns how it failed, or an empty string.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
            return f"the process ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def result_of(file: str, entries: Sequence[dict[str, Any]], failure: str, seconds: float) -> Result:
    """The result of a report's entries. A collected test without an outcome has failed."""
    outcomes: dict[str, dict[str, str]] = {"failed": {}, "skipped": {}, "passed": {}}
    for entry in entries:
        if "test" in entry:
            outcomes[entry["outcome"]][entry["test"]] = entry["reason"][-REASON_CHARACTERS:]
    failed, skipped = outcomes["failed"], outcomes["skipped"]
    passed = outcomes["passed"].keys() - failed.keys() - skipped.keys()
    collected = {test for entry in entries for test in entry.get("collected", ())}
    for test in sorted(collected - failed.keys() - skipped.keys() - passed):
        failed[test] = f"no result: {failure}"
    if not failed and (failure or not any("is_complete" in entry for entry in entries)):
        failed[file] = failure or "no complete report"
    return Result(
        file=file,
        passed=tuple(sorted(passed)),
        failed=failed,
        skipped=skipped,
        seconds=round(seconds, 1),
    )


def table(results: Sequence[Result]) -> str:
    """Results by file, the reasons, and their sum in the last line."""
    lines = ["", f"{'file':34} passed  failed  skipped  seconds"]
    for each in results:
        counts = f"{len(each.passed):6}  {len(each.failed):6}  {len(each.skipped):7}"
        lines.append(f"{each.file:34} {counts}  {each.seconds:7.1f}")
    reasons = [reason for each in results for reason in each.skipped.values()]
    lines += [f"skipped: {reasons.count(reason)}: {reason}" for reason in dict.fromkeys(reasons)]
    for each in results:
        lines += [f"FAILED {test}: {_last(reason)}" for test, reason in each.failed.items()]
    passed = sum(len(each.passed) for each in results)
    failed = sum(len(each.failed) for each in results)
    return "\n".join([*lines, f"{passed} passed, {failed} failed"])


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="default: all files of tests/gpu")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU what needs no GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-tests")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of each file")
    arguments = parser.parse_args(given)
    if not (ON_GPU or arguments.rehearse):
        parser.error("there is no GPU; --rehearse runs on a CPU what needs none")
    results = run(
        arguments.files or all_files(),
        out=arguments.out,
        rehearse=arguments.rehearse,
        seconds=arguments.seconds,
    )
    print(table(results))
    return int(any(each.failed for each in results))
