"""Programs with third-party clients, each in an environment of its own beside .venv."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def install(*environments: str) -> None:
    for name in environments:
        command = [str(ROOT / "scripts" / "beside.sh"), name, sys.executable]
        ran = subprocess.run(command, capture_output=True)
        assert ran.returncode == 0, ran.stderr.decode()


def run_client_program(
    environments: Sequence[str],
    program: str,
    *arguments: str,
    seconds: float = 900,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """The last JSON object printed by a program of tests/compat/clients, past Ray's own output."""
    beside = (ROOT / f".{name}" for name in environments)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "client", *beside)))
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.compat.clients.{program}", *arguments],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", **(variables or {})},
        timeout=seconds,
    )
    assert ran.returncode == 0, ran.stderr.decode()[-6000:]
    lines = (line for line in reversed(ran.stdout.splitlines()) if line.startswith((b"[", b"{")))
    return json.loads(next(lines))
