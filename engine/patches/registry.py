"""The patches, and the processes in which each is installed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.patches import chunked_seed, expand_kernel, graph_candidates, lora_cpu_ops

MODEL_PROCESSES = ("EngineCore", "VllmWorker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A patch of vLLM code.

    `processes` are prefixes of the names of the processes that need it; the empty prefix matches
    all.
    """

    name: str
    install: Callable[[], None]
    platform: Literal["cpu", "gpu"]
    processes: tuple[str, ...]


PATCHES = (
    Patch(name="expand_kernel", install=expand_kernel.install, platform="cpu", processes=("",)),
    Patch(
        name="chunked_seed",
        install=chunked_seed.install,
        platform="cpu",
        processes=MODEL_PROCESSES,
    ),
    Patch(
        name="adapter_rows",
        install=lora_cpu_ops.install,
        platform="cpu",
        processes=MODEL_PROCESSES,
    ),
    Patch(
        name="graph_candidates",
        install=graph_candidates.install,
        platform="gpu",
        processes=MODEL_PROCESSES,
    ),
)


def install_patches(process_name: str) -> tuple[str, ...]:
    """Install the patches for a process of this name and return their names. Idempotent."""
    from vllm.platforms import current_platform

    platform = "cpu" if current_platform.is_cpu() else "gpu"
    wanted = tuple(
        patch
        for patch in PATCHES
        if patch.platform == platform and process_name.startswith(patch.processes)
    )
    for patch in wanted:
        patch.install()
    return tuple(patch.name for patch in wanted)
