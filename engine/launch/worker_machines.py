"""Methods of vLLM's worker class for engines on several machines. They never raise."""

from pathlib import Path
from typing import Any

from vllm.utils.torch_utils import set_random_seed

from engine.launch.digests import MachineDigests, model_digest, package_versions
from engine.launch.environment import own_settings_digest
from engine.runtime.feature_guard import Failure, attempt
from engine.weights.worker_copies import COPIES, CopySource, CopyState


class MachineMethods:
    """Part of the mixin `WorkerExtension`, which uses the attributes of vLLM's worker."""

    local_rank: int
    distributed_init_method: str
    model_config: Any

    def coppice_machine_digests(self) -> MachineDigests:
        model = attempt(model_digest, Path(self.model_config.model))
        return MachineDigests(
            settings=own_settings_digest(),
            versions=package_versions(),
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
