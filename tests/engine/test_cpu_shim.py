"""vLLM's CPU shim, which replaces torch's streams and events, in processes with a GPU engine.

Each case is a process of its own, because the shim cannot be removed from one that has imported it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.attention.settings import AttentionSettings
from engine.launch.environment import engine_environment
from engine.launch.plugin import CPU_SHIM
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from tests.engine.made_arguments import features_of

pytestmark = pytest.mark.engine

ON_GPU = """
import multiprocessing, sys
import torch
stream = torch.cuda.Stream
from vllm.platforms import current_platform
type(current_platform).is_cpu = lambda self: False
"""
CLOSE = """
from types import SimpleNamespace
import vllm.v1.worker.gpu_worker
from engine.launch.worker_extension import WorkerExtension
from tests.engine.stepped_engine import EXTENSION, LiveEngine
worker = vllm.v1.worker.gpu_worker.Worker
bases = worker.__bases__
worker.__bases__ += (WorkerExtension,)
live = object.__new__(LiveEngine)
live._client, live._extension = SimpleNamespace(shutdown=lambda: None), EXTENSION
live.close()
assert worker.__bases__ == bases
"""
INSTALL = """
from engine.runtime import process_setup
process_setup.exit_with_service = lambda: None
multiprocessing.current_process().name = "EngineCore_DP0"
from engine.launch.plugin import install
install()
"""
UNCHANGED = f"""
assert torch.cuda.Stream is stream and "{CPU_SHIM}" not in sys.modules
print("unchanged")
"""


def run(tmp_path: Path, program: str) -> "subprocess.CompletedProcess[str]":
    """The end of a process with the environment of a GPU engine's processes."""
    features = features_of(
        EngineSettings(),
        attention=AttentionSettings(shared_prefix="always"),
        speculation=SpeculationSettings(mode="siblings"),
    )
    with engine_environment(
        EngineSettings(), of_features=features.environment(), on_cpu=False, temp_dir=tmp_path
    ):
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_close_of_a_live_engine_leaves_the_shim_out(tmp_path: Path) -> None:
    child = run(tmp_path, ON_GPU + CLOSE + UNCHANGED)
    assert child.stdout.endswith("unchanged\n"), child.stderr


def test_hooks_of_a_gpu_engine_leave_the_shim_out(tmp_path: Path) -> None:
    child = run(tmp_path, ON_GPU + INSTALL + UNCHANGED)
    assert child.stdout.endswith("unchanged\n"), child.stderr


def test_start_on_a_gpu_is_refused_if_something_else_has_imported_the_shim(tmp_path: Path) -> None:
    child = run(tmp_path, f"{ON_GPU}import {CPU_SHIM}\n{INSTALL}")
    assert child.returncode == 1
    assert f"RuntimeError: {CPU_SHIM} is imported in a process of a GPU engine" in child.stderr
