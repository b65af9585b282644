"""Comparison of package versions, models and settings between an engine's machines."""

import asyncio
import hashlib
import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypedDict

import torch
from vllm import __version__ as vllm_version

from engine.errors import StartFailed
from engine.settings import EngineSettings

if TYPE_CHECKING:
    from engine.launch.processes import VllmProcesses

BLOCK_BYTES: Final = 2**16
NUM_BLOCKS: Final = 32


class MachineDigests(TypedDict):
    """Digests of a rank's settings, of the versions of its packages, and of its model."""

    settings: str
    versions: str
    model: str


_DIFFERENCES: Final[tuple[tuple[Literal["settings", "versions", "model"], str], ...]] = (
    (
        "settings",
        "were started with other settings than {first}; all but engine.node_rank must be the same",
    ),
    ("versions", "have other versions of Coppice, vLLM or torch than {first}"),
    ("model", "have other files of the model than {first}"),
)


async def synchronize_machines(processes: "VllmProcesses", settings: EngineSettings) -> None:
    """Give the ranks of all machines one random seed, and the model's path on machine 0.

    Each rank samples all tokens itself, so unequal seeds would give unequal tokens. Raises
    StartFailed if the machines have different settings, versions or models.
    """
    if not settings.uses_several_machines:
        return
    digests = await processes.call_workers("coppice_machine_digests")
    model = processes.llm.vllm_config.model_config
    if settings.uses_ray:
        own = await asyncio.to_thread(_service_digests, digests[0]["settings"], Path(model.model))
        check_ranks_equal(digests, own)
    else:
        check_machines_equal(digests, settings.ranks_per_node)
    await processes.call_workers("coppice_join_machines", model.seed, model.model)


def _service_digests(settings: str, model: Path) -> MachineDigests:
    """Digests of the service's machine. Ranks that Ray places get the settings of the service."""
    return MachineDigests(settings=settings, versions=package_versions(), model=model_digest(model))


def check_machines_equal(digests: Sequence[MachineDigests], ranks_per_node: int) -> None:
    """Raise StartFailed if the ranks of machines differ from those of machine 0."""
    for name, difference in _DIFFERENCES:
        values = [found[name] for found in digests]
        if others := [rank for rank, value in enumerate(values) if value != values[0]]:
            nodes = sorted({rank // ranks_per_node for rank in others})
            raise StartFailed(f"machines {nodes} {difference.format(first='machine 0')}")


def check_ranks_equal(digests: Sequence[MachineDigests], service: MachineDigests) -> None:
    """Raise StartFailed if ranks that Ray has placed differ from the service's own machine."""
    for name, difference in _DIFFERENCES:
        ranks = [rank for rank, found in enumerate(digests) if found[name] != service[name]]
        if ranks:
            first = "the machine of the service"
            raise StartFailed(f"the nodes of ranks {ranks} {difference.format(first=first)}")


def package_versions() -> str:
    """Versions of Coppice, vLLM and torch."""
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
