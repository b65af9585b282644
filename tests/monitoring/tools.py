"""Promtool and the files that it checks."""

import subprocess
from pathlib import Path

from tests.tools import ROOT, tool

MONITORING = ROOT / "helm" / "coppice" / "monitoring"
RULES = [MONITORING / "recording.yaml", MONITORING / "alerts.yaml"]


def promtool(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [tool("promtool"), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
