"""Methods of vLLM's worker class for engines on several machines. They never raise."""

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
from vllm import __version__ as vllm_version
from vllm.utils.torch_utils import set_random_seed

from engine.launch.environment import own_settings_digest
from engine.launch.machines import MachineDigests
from engine.runtime.feature_guard import Failure, attempt
from engine.weights.worker_copies import COPIES, CopySource, CopyState

BLOCK_BYTES: Final = 2**16
NUM_BLOCKS: Final = 32


class MachineMethods:
    """Part of the mixin `WorkerExtension`, which uses the attributes of vLLM's worker."""

    local_rank: int
    distributed_init_method: str
    model_config: Any

    def coppice_machine_digests(self) -> MachineDigests:
        model = attempt(model_digest, Path(self.model_config.model))
        return MachineDigests(
            settings=own_settings_digest(),
            versions=_versions(),
            model=model.message if isinstance(model, Failure) else model,
        )

    def coppice_join_machines(self, seed: int, model: str) -> None:
        """Set the seed of samples that have none, and the model's path on machine 0."""
        set_random_seed(seed)
        COPIES.set_local_path(model, self.model_config.model)

    def coppice_start_copy(self, source: CopySource) -> CopyState:
        started = attempt(COPIES.start, source, local_rank=self.local_rank)
        return _failed(started) if isinstance(started, Failure) else _state(source["path"])

    def coppice_copy_state(self, path: str) -> CopyState:
        return _state(path)

    def coppice_keep_copy(self, path: str) -> None:
        attempt(COPIES.keep, path)

    def coppice_discard_copy(self, path: str) -> None:
        attempt(COPIES.discard, path)

    def coppice_drop_copy(self, path: str) -> None:
        attempt(COPIES.drop, path)


def _state(path: str) -> CopyState:
    state = attempt(COPIES.state, path)
    return _failed(state) if isinstance(state, Failure) else state


def _failed(failure: Failure) -> CopyState:
    return CopyState(is_ready=False, error=failure.message)


def _versions() -> str:
    try:
        own = version("coppice-rl")
    except PackageNotFoundError:  # run from a source tree
        own = ""
    return f"{own} {vllm_version} {torch.__version__}"


def model_digest(folder: Path) -> str:
    """Digest of a model's configuration, and of blocks at equal distances in its weights files."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            num_bytes = stream.seek(0, os.SEEK_END)
            digest.update(f"{file.name} {num_bytes}".encode())
            for start in range(0, num_bytes, max(BLOCK_BYTES, num_bytes // NUM_BLOCKS)):
                stream.seek(start)
                digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()
