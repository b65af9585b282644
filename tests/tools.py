"""Programs that tests run beside ours: from `scripts/tools.sh`, or the system's own."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_TOOLS = ROOT / ".venv" / "tools" / "usr"


def tool(name: str) -> str:
    ours = [_TOOLS / folder / name for folder in ("bin", "sbin")]
    found = next((str(path) for path in ours if path.exists()), None) or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: scripts/tools.sh gets it from Debian")
    return found


def tool_environment() -> dict[str, str]:
    """What was unpacked finds the libraries that were unpacked with it."""
    folders = [str(path) for path in (_TOOLS / "lib").glob("*-linux-gnu")]
    known = os.environ.get("LD_LIBRARY_PATH")
    return os.environ | {"LD_LIBRARY_PATH": ":".join([*folders, *([known] if known else [])])}
