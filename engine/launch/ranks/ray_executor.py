"""Subclass of vLLM's Ray executor: ranks with Coppice's environment, also on CPUs.

EngineCore is the driver of a Ray job. The ranks are actors of the job, so Ray ends them when
EngineCore ends, also if it is killed. EngineCore fails when an actor has ended.

A rank's process is started by Ray's node, not by EngineCore, and has that node's environment. It
gets the variables of `rank_variables` before it imports torch, and none with credentials.
"""

import multiprocessing
import os
from pathlib import Path
from typing import Any, Final

import ray
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_utils import WORKER_SPECIFIC_ENV_VARS

from engine.errors import StartFailed
from engine.launch.environment import (
    interface_variables,
    rank_preload,
    rank_variables,
)
from engine.launch.ranks.multi_machine_setup import set_network_variables

CPU: Final = "CPU"


def install_ray_executor() -> None:
    """Have vLLM use `RayExecutor` for its executor `ray`, from the service's process."""
    ray_executor_v2.RayExecutorV2 = RayExecutor


_VllmExecutor: Any = ray_executor_v2.RayExecutorV2


class RayExecutor(ray_executor_v2.RayExecutorV2):  # type: ignore[misc]
    """vLLM's Ray executor, in EngineCore, with actors of the class `RayRank`."""

    parallel_config: Any

    def _init_executor(self) -> None:
        ray_executor_v2.RayWorkerProc = RayRank
        # vLLM would send all other variables as defaults of a rank.
        WORKER_SPECIFIC_ENV_VARS.update(os.environ.keys() - interface_variables(os.environ))
        if current_platform.is_cpu():
            current_platform.ray_device_key = CPU
        _connect(self.parallel_config.ray_runtime_env)
        super()._init_executor()

    def _build_runtime_env(self) -> dict[str, Any]:
        runtime_env: dict[str, Any] = super()._build_runtime_env()
        preload = rank_preload(os.environ) if current_platform.is_cpu() else {}
        variables = rank_variables(os.environ) | preload
        return runtime_env | {"env_vars": variables | runtime_env["env_vars"]}

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        """Resources of a rank. On a CPU these are the ones that its bundle reserves."""
        if current_platform.is_cpu():
            return {}
        resources: dict[str, Any] = _VllmExecutor._get_actor_resource_kwargs()
        return resources


def _connect(runtime_env: Any) -> None:
    """Connect to the cluster of RAY_ADDRESS, or of this machine. Ray would start one if called so.

    vLLM connects only if this process has not.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="auto", runtime_env=runtime_env)


class RayRank(ray_executor_v2.RayWorkerProc):  # type: ignore[misc]
    """A rank in an actor of Ray."""

    _init_kwargs: dict[str, Any]

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        if current_platform.is_cpu():
            return ray.get_runtime_context().get_node_id(), []
        found: tuple[str, list[int]] = super().get_node_and_physical_gpu_ids()
        return found

    def initialize_worker(
        self,
        local_rank: int,
        env_vars: dict[str, str],
        distributed_init_method: str,
        driver_env_vars: dict[str, str] | None = None,
        assigned_physical_gpu_ids: list[int] | None = None,
    ) -> None:
        address = ray.util.get_node_ip_address()
        _check_model(self._init_kwargs["vllm_config"].model_config.model, address)
        set_network_variables(address, driver_env_vars or {})
        if current_platform.is_cpu():
            _separate_nodes(ray.get_runtime_context().get_node_id())
        # The plugin installs patches by the name that vLLM's executor mp gives to a rank.
        multiprocessing.current_process().name = f"VllmWorker-{self._init_kwargs['rank']}"
        super().initialize_worker(
            local_rank,
            env_vars,
            distributed_init_method,
            driver_env_vars,
            assigned_physical_gpu_ids or None,
        )


def _separate_nodes(node_id: str) -> None:
    """Have CPU ranks communicate through shared memory only if all of them are on one node.

    vLLM compares the ranks' names of the memory, whose only identifier of an engine is a port.
    """
    group_name = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: f"{group_name(communicator)}-{node_id}"
    )


def _check_model(model: str, address: str) -> None:
    if not Path(model).is_dir():
        raise StartFailed(
            f"the Ray node {address} has no model at {model}: the model's files must be at the "
            "same path on each node that runs ranks"
        )
