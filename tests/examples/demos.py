"""Runs of the examples that train a model, as `make` starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tools import ROOT


def run_demo(module: str, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Steps and output of a whole run with seed 1, which must have learned."""
    ran = subprocess.run(
        [sys.executable, "-m", module, "--seed", "1", "--out", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    steps: list[dict[str, Any]] = json.loads((folder / "steps.json").read_text())
    return steps, ran.stdout
