"""Registration of the shared-prefix attention backends with vLLM, and their state.

Must run before a model is loaded, in the processes that load one.
"""

import functools
from typing import Any

from engine.attention import cuda_steps
from engine.attention.counters import COUNTERS
from engine.attention.settings import AttentionSettings
from engine.attention.target_builders import target_builders
from engine.runtime.feature_guard import feature
from engine.runtime.warm_up import on_warmed_up
from engine.types.feature_stats import AttentionState

CPU_BACKEND = "engine.attention.cpu_backend.SharedPrefixBackend"
CUDA_BACKEND = "engine.attention.cuda_backend.SharedPrefixBackend"

FEATURE = feature("shared-prefix attention")

_settings: AttentionSettings | None = None


def install(settings: AttentionSettings) -> None:
    global _settings
    _settings = settings
    if settings.shared_prefix != "off":
        _register()


def settings() -> AttentionSettings:
    """Attention settings that `install` was called with in this process."""
    assert _settings is not None, "attention backend used before `install`"
    return _settings


def state(runner: Any) -> AttentionState:
    """State of shared-prefix attention in this process, once vLLM's model runner has a KV cache."""
    if settings().shared_prefix == "off":
        return "off"
    if not (FEATURE.state.on and cuda_steps.FEATURE.state.on):
        return "failed"
    reasons = [builder.grouper.unsupported for _, builder in target_builders(runner)]
    return "on" if None in reasons else next(filter(None, reasons), "backend")


def _prepare(worker: Any) -> None:
    """Callback after the warm-up, whose steps are not counted."""
    from engine.attention import cuda_rank_setup

    cuda_rank_setup.prepare(worker.model_runner)
    COUNTERS.reset()


@functools.cache
def _register() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    else:
        cuda_steps.install()
        on_warmed_up(_prepare)
        register_backend(AttentionBackendEnum.FLASH_ATTN, CUDA_BACKEND)
