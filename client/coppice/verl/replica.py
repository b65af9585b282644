"""verl's `rollout.name: coppice`: a replica is an existing Coppice server on any host."""

from typing import Any

import ray
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.utils.device import get_device_name
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from coppice.errors import Unsupported
from coppice.verl.server import CoppiceServer
from coppice.verl.server_list import ServerList


class CoppiceReplica(RolloutReplica):  # type: ignore[misc]
    """Replica without GPUs in Ray. verl's number of rollout GPUs sets the number of replicas."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.is_reward_model or self.is_teacher_model:
            raise Unsupported("only the policy is served: use vllm or sglang for this model")
        lora = self.model_config.get("lora") or {}
        rank = self.model_config.get("lora_rank", 0) or lora.get("rank", 0)
        if rank and not lora.get("merge", False):
            raise Unsupported(
                "adapters are not sent by themselves: set actor_rollout_ref.model.lora.merge=True"
            )
        self._server_list = ServerList.of(self.config.engine_kwargs)

    async def init_standalone(self) -> None:
        """Creates verl's placeholder worker for weight updates, without a GPU."""
        if self.config.checkpoint_engine.backend != "coppice":
            raise Unsupported("a trainer apart sends weights by checkpoint_engine.backend=coppice")
        self.rollout_mode = RolloutMode.STANDALONE
        name = f"coppice_{self.replica_rank}{self.name_suffix}"
        self.resource_pool = RayResourcePool(
            [1], use_gpu=False, max_colocate_count=1, name_prefix=f"{name}_pool"
        )
        group = RayWorkerGroup(
            resource_pool=self.resource_pool,
            ray_cls_with_init=self.get_ray_class_with_init_args(),
            bin_pack=False,
            name_prefix=f"{name}_worker",
            use_gpu=False,
            device_name=get_device_name(),
        )
        self.workers = group.workers
        await self.launch_servers()

    async def launch_servers(self) -> None:
        handle = ray.remote(CoppiceServer)
        options = handle.options(
            name=f"coppice_server_{self.replica_rank}{self.name_suffix}",
            num_cpus=0,
            max_concurrency=self.max_concurrency,
        )
        server = options.remote(
            self._server_list.url(self.replica_rank),
            self._server_list.key(),
            self.config.prompt_length,
            self.config.response_length,
        )
        self._server_address = await server.launch.remote(self.config.server.max_start_wait_time)
        self._server_handle = server
        self.servers = [server]
