"""Checks of data-parallel settings, and a vLLM coordinator process that ends with the service.

They share nothing, so that each request runs on one of them. vLLM's coordinator process collects
their load; without mixture-of-experts layers nothing else depends on it.
"""

from typing import Any

from vllm.v1.engine import coordinator

from engine.errors import StartFailed
from engine.runtime.process_setup import create_process_group, exit_with_service
from engine.settings import EngineSettings


def check_settings(settings: EngineSettings) -> None:
    """Raise StartFailed for settings that exclude several engines, with the reason."""
    if settings.data_parallel_size == 1:
        return
    if settings.nnodes > 1:
        raise StartFailed(
            "engine.data_parallel_size and engine.nnodes above 1 exclude each other: all engines "
            "of a service are on one machine; run more replicas instead"
        )
    if settings.uses_ray:
        raise StartFailed(
            "engine.data_parallel_size above 1 and engine.distributed_executor_backend ray exclude "
            "each other: all engines of a service are on one machine; run more replicas instead"
        )


def check_model(config: Any) -> None:
    """Raise StartFailed for a mixture-of-experts model on several engines.

    vLLM has their engines step together, with collective operations in each step. A call that waits
    for the ranks of one engine, such as a load of an adapter, would then block the others.
    """
    if config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe:
        raise StartFailed(
            "engine.data_parallel_size above 1 does not support mixture-of-experts models, whose "
            "engines would have to step together; run more replicas instead"
        )


_VllmCoordinator: Any = coordinator.DPCoordinatorProc


class CoordinatorProcess(coordinator.DPCoordinatorProc):  # type: ignore[misc]
    """vLLM's coordinator process, which here ends with the service, and not by its Ctrl-C."""

    @staticmethod
    def run_coordinator(*args: Any, **kwargs: Any) -> None:
        create_process_group()
        exit_with_service()
        _VllmCoordinator.run_coordinator(*args, **kwargs)


def install_coordinator() -> None:
    """Have vLLM start its coordinator as `CoordinatorProcess`, from the service's process.

    vLLM's own is left behind if the service is killed.
    """
    coordinator.DPCoordinatorProc = CoordinatorProcess
