"""The Triton kernels, compiled for GPUs by the locked Triton, against the recorded facts.

CPUs have another version of Triton. This one is downloaded, and nothing is run on a GPU. After a
change of a kernel or of the lock, `compiled_kernels.json` is recorded with

    PYTHONPATH=DIRECTORY:.:client .venv/bin/python -m tests.soak.compile_kernels

where `pip install --no-deps --target DIRECTORY triton==VERSION` has installed the locked version.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_suffix(".json")
INSTALL = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
Facts = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    folder = tmp_path_factory.mktemp("triton")
    [locked] = re.findall(r"^triton==\S+", (ROOT / "requirements/gpu.txt").read_text(), re.M)
    subprocess.run([*INSTALL, "--target", folder / "site", locked], check=True)
    environment = os.environ | {
        "PYTHONPATH": f"{folder / 'site'}:{ROOT}:{ROOT / 'client'}",
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, "-m", "tests.soak.compile_kernels"]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: Facts = json.loads(ran.stdout)
    return found


def test_registers_shared_memory_and_spills_are_as_recorded(compiled: Facts) -> None:
    assert compiled == json.loads(RECORDED.read_text())


def test_nothing_spills(compiled: Facts) -> None:
    assert {name for name, facts in compiled.items() if facts["spilled_bytes"]} == set()


def test_every_kernel_is_compiled() -> None:
    from tests.soak.compile_kernels import kernels

    compiled = {kernel.function.__name__ for kernel in kernels()}
    texts = [file.read_text() for file in (ROOT / "kernels").rglob("*.py")]
    defined = {name for text in texts for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)}
    assert compiled == defined
