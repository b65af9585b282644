"""The machine of a soak run, and the output of its tables."""

import os
import platform
from pathlib import Path

import psutil


def machine() -> str:
    cpus = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total / 2**30
    return f"{platform.machine()}, {cpus} processors, {memory:.0f} GiB, no GPU"


def write(report: Path, name: str, table: str) -> None:
    """Writes a table between the markers of that name."""
    begin, end = f"<!-- {name}: written by `make soak` -->\n", f"<!-- end of {name} -->"
    before, rest = report.read_text().split(begin)
    report.write_text(before + begin + table + end + rest.split(end)[1])
