"""Worker methods for engines on several machines: digests, local paths, file checks."""

from pathlib import Path
from typing import Any

from vllm.utils.torch_utils import set_random_seed

from engine.launch.ranks.digests import MachineDigests, model_digest, package_versions
from engine.runtime.feature_guard import Failure, attempt
from engine.runtime.process_environment import own_settings_digest
from engine.weights.checkpoint import fingerprint


class MachineMethods:
    """Part of the mixin `WorkerExtension`, which uses the attributes of vLLM's worker."""

    model_config: Any
    coppice_first_model: str | None = None

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
        self.coppice_first_model = model

    def coppice_local_path(self, path: str) -> str:
        """Path on this machine of files that machine 0 has at `path`.

        Only the files that the engine started from may be elsewhere.
        """
        return self.model_config.model if path == self.coppice_first_model else path

    def coppice_sees_files(self, path: str, files: str) -> bool:
        """True if this machine sees the files of machine 0, as on a shared file system."""
        return files == fingerprint(Path(path))
