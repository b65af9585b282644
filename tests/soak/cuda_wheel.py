"""vLLM's wheel for GPUs against what the engine was written for, on a machine without a GPU.

Downloads half a gigabyte, so only `make soak` runs it.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine.launch.vllm_seams import (
    SUPPORTED_VERSION,
    attributes_of,
    differences,
    installed_package,
    recorded_attributes,
    recorded_seams,
    seams_of,
)

ROOT = Path(__file__).parents[2]
OF_THE_CPU_WHEEL = {"_version.py", "platforms/__init__.py", "utils/cpu_triton_utils.py"}
DOWNLOAD = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
ON_GPUS = """
import functools
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
import vllm

from engine.attention import cuda_backend, cuda_steps
from engine.cudagraphs.planner import Plan
from engine.drafter.core import engine_core_methods
from engine.drafter.worker import draft_speculator
from engine.kv_transfer import connector
from engine.kv_transfer.worker import cache_blocks, cuda_block_exporter, cuda_block_loader
from engine.kv_transfer.worker import cuda_host_memory, export_setup, export_writer, loader
from engine.launch import engine_core_methods, worker_extension
from engine.cudagraphs import graph_candidates
from engine.speculation import custom_class_proposer
from engine.speculation.worker import gpu_speculator
from engine.speculation.worker import speculator_factory
from engine.weights import worker_reload

assert vllm.__file__.startswith({site!r}), vllm.__file__
assert not current_platform.is_cpu()
before = {{cls: dict(vars(cls)) for cls in (BlockTables, GPUModelRunner, ModelCudaGraphManager)}}
cuda_steps.install()
graph_candidates.install_plan(Plan(shapes=(), estimated_bytes=0, budget_bytes=None))
engine_core_methods.install()
speculator_factory.install()
assert hasattr(model_runner.init_speculator, "__wrapped__")
assert not draft_speculator.DraftSpeculator.__abstractmethods__
gpu_speculator.load_drafts_before_inputs()
assert not gpu_speculator.SiblingSpeculator.__abstractmethods__
changed = {{
    f"{{cls.__name__}}.{{name}}"
    for cls, old in before.items()
    for name, value in vars(cls).items()
    if old.get(name) is not value
}}
assert changed == {{
    "BlockTables.__init__",
    "BlockTables.append_block_ids",
    "GPUModelRunner.gather_batch_req_state",
    "GPUModelRunner.prepare_inputs",
    "ModelCudaGraphManager._init_candidates",
    "ModelCudaGraphManager.capture",
    "ModelCudaGraphManager.dispatch",
}}, changed
own = [name for name in dir(worker_extension.WorkerExtension) if not name.startswith("__")]
assert own and not any(hasattr(Worker, name) for name in own), own
abstract = connector.PromptKvConnector.__abstractmethods__
assert not abstract, abstract
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel. Its compiled extensions are left out: they need CUDA's libraries."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*DOWNLOAD, "-d", folder, f"vllm=={SUPPORTED_VERSION}"], check=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
        archive.extractall(folder / "site", names)
    wheel.unlink()
    return folder / "site"


def python_files(package: Path) -> dict[str, bytes]:
    return {str(file.relative_to(package)): file.read_bytes() for file in package.rglob("*.py")}


def test_extended_and_private_code_is_as_recorded(site: Path) -> None:
    recorded = [seam for seam in recorded_seams() if seam.path not in OF_THE_CPU_WHEEL]
    assert differences(seams_of(site / "vllm", recorded), recorded) == []
    assert attributes_of(site / "vllm", recorded_attributes()) == recorded_attributes()


def test_sources_are_those_of_the_cpu_wheel(site: Path) -> None:
    """So whatever is tested with the CPU wheel is tested with the code that GPUs run."""
    of_gpus, of_cpus = python_files(site / "vllm"), python_files(installed_package())
    assert {name for name in of_cpus if of_gpus.get(name) != of_cpus[name]} == OF_THE_CPU_WHEEL
    more = of_gpus.keys() - of_cpus.keys()
    assert all(name.startswith(("third_party/", "vllm_flash_attn/")) for name in more)


def test_gpu_code_imports_and_patches_it_without_a_gpu(site: Path) -> None:
    command = [sys.executable, "-c", ON_GPUS.format(site=str(site))]
    environment = {"PYTHONPATH": f"{site}:{ROOT}:{ROOT / 'client'}", "VLLM_PLUGINS": ""}
    ran = subprocess.run(
        command, env=environment, cwd=site, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
