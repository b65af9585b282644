"""Prometheus and promtool: from `scripts/tools.sh`, or the system's own."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "helm" / "coppice" / "monitoring"
RULES = [MONITORING / "recording.yaml", MONITORING / "alerts.yaml"]


def tool(name: str) -> str:
    ours = ROOT / ".venv" / "tools" / "usr" / "bin" / name
    found = str(ours) if ours.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: scripts/tools.sh gets it from Debian")
    return found


def promtool(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [tool("promtool"), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
