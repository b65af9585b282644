"""All measurements that need a GPU, in stages that fit into short leases of one.

    python -m bench.gpu_evidence --stage NAME [--stage NAME] --budget SECONDS --out DIRECTORY
    python -m bench.gpu_evidence --list
    python -m bench.gpu_evidence --rehearse --out DIRECTORY

Each measurement is a process of its own. Its result is written to DIRECTORY/STAGE.json when it
ends, and one that is done there, or in the directory of an earlier run (`--earlier`), is not
repeated. A measurement starts only if its usual time is left of the budget, and is stopped at the
end of the budget. `--rehearse` runs a tiny model on the CPU, and names what cannot run there.

Nothing is installed and nothing is written to the working tree, except the compiled draft store if
it is missing. Models with random weights are written to `--models`.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from bench.evidence.stages import STAGES, Measurement, Place
from bench.harness.record import environment

ROOT: Final = Path(__file__).parents[1]
TAIL_CHARACTERS: Final = 4000
Status = Literal["done", "failed", "stopped", "not possible"]


@dataclass(slots=True)
class Results:
    """Results of one stage, written to its file after each measurement."""

    file: Path
    measurements: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, out: Path, earlier: Path | None) -> "Results":
        """The results in `out`, and those that are done in an earlier directory."""
        results = cls(out / f"{name}.json")
        for file in (*([earlier / f"{name}.json"] if earlier else []), results.file):
            if file.exists():
                results.measurements |= json.loads(file.read_text())["measurements"]
        return results

    def is_done(self, name: str) -> bool:
        return self.measurements.get(name, {}).get("status") == "done"

    def add(self, name: str, **result: Any) -> None:
        """Add a result, replacing the file at once, so that it is complete at any time."""
        self.measurements[name] = result
        content = environment("gpu_evidence") | {"measurements": self.measurements}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".new")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(self.file)


def run_stage(
    measurements: Sequence[Measurement],
    results: Results,
    *,
    models: Path,
    rehearse: bool,
    until: float,
) -> None:
    """Run what is not done yet; `until` is the end of the budget on the monotonic clock."""
    for measurement in measurements:
        if results.is_done(measurement.name):
            _say(measurement.name, "done before")
            continue
        if rehearse and measurement.not_on_cpu:
            result: dict[str, Any] = {"status": "not possible", "reason": measurement.not_on_cpu}
        elif (left := until - time.monotonic()) < measurement.seconds:
            _say(measurement.name, f"left out: {left:.0f} of {measurement.seconds} s are left")
            continue
        else:
            result = _measured(measurement, models=models, rehearse=rehearse, limit=left)
        results.add(measurement.name, **result)
        _say(measurement.name, result["status"])


def _measured(
    measurement: Measurement, *, models: Path, rehearse: bool, limit: float
) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = Place(folder=Path(folder), models=models, rehearse=rehearse)
        status, output = _execute(measurement.arguments(place), limit)
        result: dict[str, Any] = {"status": status}
        if status != "stopped":
            try:
                result["result"] = measurement.read(place, output)
            except (ValueError, OSError, IndexError):
                result["status"] = "failed"
    if result["status"] != "done":
        result["output"] = output[-TAIL_CHARACTERS:]
    return result | {"seconds": round(time.monotonic() - began, 1)}


def _execute(arguments: Sequence[str], limit: float) -> tuple[Status, str]:
    """Run a module in a process group of its own, which is killed at the limit."""
    command = [sys.executable, "-m", *arguments]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        status: Status = "stopped"
        try:
            status = "failed" if process.wait(limit) else "done"
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_group(process)
        log.seek(0)
        return status, log.read()


def _kill_group(process: "subprocess.Popen[Any]") -> None:
    """Kill what a measurement leaves behind; vLLM's EngineCore is in a group of its own."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in found:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def _say(name: str, what: str) -> None:
    print(f"  {name:24} {what}", flush=True)


def prepare(folder: Path) -> None:
    """Make the working tree usable where the project is not installed.

    vLLM finds the plugin by an entry point, and the draft store is compiled code.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [
            str(ROOT),
            str(ROOT / "client"),
            str(folder),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
    )
    if not is_plugin_installed():
        _write_entry_point(folder / "coppice_rl-0.dist-info")
    built = ROOT / "kernels" / "draft_index" / "libdraft_index.so"
    if not built.exists() and shutil.which("g++"):
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT)


def is_plugin_installed() -> bool:
    return "coppice" in importlib.metadata.entry_points(group="vllm.general_plugins").names


def _write_entry_point(information: Path) -> None:
    information.mkdir(parents=True, exist_ok=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: coppice-rl\nVersion: 0\n")
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ncoppice = engine.launch.plugin:install\n"
    )


def list_stages() -> None:
    for stage, measurements in STAGES.items():
        print(f"{stage}: {sum(m.seconds for m in measurements)} s")
        for measurement in measurements:
            _say(measurement.name, f"{measurement.seconds:4} s  {measurement.not_on_cpu}")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", action="append", choices=STAGES, help="default: all")
    parser.add_argument("--budget", type=float, default=540, help="seconds of this run")
    parser.add_argument("--out", type=Path, help="directory of the results")
    parser.add_argument("--earlier", type=Path, help="directory of an earlier run's results")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "evidence")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--list", action="store_true", help="list stages and measurements")
    arguments = parser.parse_args(given)
    until = time.monotonic() + arguments.budget
    if arguments.list:
        list_stages()
        return 0
    if arguments.out is None:
        parser.error("--out is required")
    prepare(arguments.models / "site")
    if arguments.rehearse:
        os.environ["COPPICE_REHEARSE"] = "1"
    failed = False
    for stage in arguments.stage or STAGES:
        print(stage, flush=True)
        name = f"rehearsal-{stage}" if arguments.rehearse else stage
        results = Results.of(name, arguments.out, arguments.earlier)
        run_stage(
            STAGES[stage],
            results,
            models=arguments.models,
            rehearse=arguments.rehearse,
            until=until,
        )
        failed |= any(each["status"] == "failed" for each in results.measurements.values())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
