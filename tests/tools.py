"""External programs for tests: from `scripts/tools.sh`, or installed on the system."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / ".venv" / "tools"
_TOOLS = TOOLS / "usr"


def tool(name: str) -> str:
    ours = [_TOOLS / folder / name for folder in ("bin", "sbin")]
    found = next((str(path) for path in ours if path.exists()), None) or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: scripts/tools.sh gets it from Debian")
    return found


def compiler() -> str | None:
    """Path of the C++ compiler that the setup uses."""
    return shutil.which(os.environ.get("CXX", "c++"))


def tool_environment() -> dict[str, str]:
    """The environment in which unpacked programs find the libraries unpacked with them."""
    roots = (_TOOLS / "lib", TOOLS / "lib")
    folders = [str(path) for root in roots for path in root.glob("*-linux-gnu*")]
    folders += [str(path) for path in (_TOOLS / "lib").glob("*-linux-gnu/pulseaudio")]
    known = os.environ.get("LD_LIBRARY_PATH")
    return os.environ | {"LD_LIBRARY_PATH": ":".join([*folders, *([known] if known else [])])}
