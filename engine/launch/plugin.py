"""Entry point of Coppice's vLLM plugin: installs patches and hooks in each process.

vLLM calls `install` in the service and in every process that it starts. In a vLLM that Coppice did
not start it does nothing.
"""

import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.held_outputs import hooks as held_outputs
from engine.patches import (
    chunked_seed,
    cpu_amx_permission,
    cpu_int8_kernel,
    cpu_moe_reload,
    cpu_sampling_expansion,
    lora_cpu_ops,
    nan_logits,
    reload_memory,
    same_blocks,
    token_logprobs,
)
from engine.runtime import process_setup, start_phases
from engine.runtime.process_environment import started_by_coppice
from engine.sampling import (
    given_prompt_logprobs,
    request_copies,
    request_hooks,
    routed_experts,
    support_hooks,
)

MODEL_PROCESSES = ("EngineCore", "VllmWorker")
CPU_SHIM = "vllm.v1.worker.cpu.shm"
"""Module of vLLM's CPU worker that replaces torch's streams, events and pinned memory."""
_installed = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A patch of vLLM code, or a hook in it, and the processes that need it.

    `processes` are prefixes of process names; the empty prefix matches all.
    """

    name: str
    install: Callable[[], None]
    platform: Literal["cpu", "gpu"]
    processes: tuple[str, ...]


PATCHES = (
    Patch(
        name="expand_kernel",
        install=cpu_sampling_expansion.install,
        platform="cpu",
        processes=("",),
    ),
    Patch(
        name="amx_permission",
        install=cpu_amx_permission.install,
        platform="cpu",
        processes=MODEL_PROCESSES,
    ),
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
        name="moe_reload",
        install=cpu_moe_reload.install,
        platform="cpu",
        processes=MODEL_PROCESSES,
    ),
    Patch(
        name="held_outputs",
        install=held_outputs.install,
        platform="cpu",
        processes=("EngineCore",),
    ),
    Patch(
        name="nan_logits",
        install=nan_logits.install,
        platform="cpu",
        processes=MODEL_PROCESSES,
    ),
    Patch(
        name="held_outputs",
        install=held_outputs.install,
        platform="gpu",
        processes=("EngineCore",),
    ),
    Patch(
        name="nan_logits",
        install=nan_logits.install_on_gpu,
        platform="gpu",
        processes=MODEL_PROCESSES,
    ),
    Patch(
        name="int8_kernel",
        install=cpu_int8_kernel.install,
        platform="cpu",
        processes=MODEL_PROCESSES,
    ),
    Patch(
        name="prompt_token_ids",
        install=given_prompt_logprobs.install,
        platform="cpu",
        processes=MODEL_PROCESSES,
    ),
    Patch(
        name="routed_experts",
        install=routed_experts.install_on_cpu,
        platform="cpu",
        processes=MODEL_PROCESSES,
    ),
    Patch(
        name="prompt_token_ids",
        install=given_prompt_logprobs.install,
        platform="gpu",
        processes=MODEL_PROCESSES,
    ),
    Patch(
        name="routed_experts",
        install=routed_experts.install_on_gpu,
        platform="gpu",
        processes=MODEL_PROCESSES,
    ),
    Patch(
        name="reload_memory",
        install=reload_memory.install,
        platform="gpu",
        processes=MODEL_PROCESSES,
    ),
    Patch(
        name="same_blocks",
        install=same_blocks.install,
        platform="cpu",
        processes=("EngineCore",),
    ),
    Patch(
        name="same_blocks",
        install=same_blocks.install,
        platform="gpu",
        processes=("EngineCore",),
    ),
    Patch(
        name="token_logprobs",
        install=token_logprobs.install,
        platform="gpu",
        processes=MODEL_PROCESSES,
    ),
)


def install_patches(process_name: str) -> tuple[str, ...]:
    """Install the patches that the named process needs; returns their names. Idempotent."""
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


def check_cpu_shim() -> None:
    """Raise RuntimeError, which ends the start, if this process has a GPU and vLLM's CPU shim."""
    from vllm.platforms import current_platform

    if CPU_SHIM in sys.modules and not current_platform.is_cpu():
        raise RuntimeError(
            f"{CPU_SHIM} is imported in a process of a GPU engine, where it replaces CUDA streams "
            "and events by placeholders: remove the vLLM plugin or the package that imports "
            "vllm.v1.worker.cpu_worker"
        )


def install() -> None:
    global _installed
    if _installed or not started_by_coppice():
        return
    _installed = True
    name = multiprocessing.current_process().name
    if name.startswith("EngineCore"):
        from engine.launch import engine_core_methods

        process_setup.create_process_group()
        process_setup.exit_with_service()
        engine_core_methods.install()
        support_hooks.install_in_engine_core()
        request_copies.install()
    install_patches(name)
    if name.startswith(MODEL_PROCESSES):
        from engine import features  # not needed in vLLM's other processes

        support_hooks.install_in_worker()
        request_hooks.install()
        features.install_in_worker()
        start_phases.install()
    check_cpu_shim()
    process_setup.freeze_gc()
