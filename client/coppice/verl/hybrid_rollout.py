"""Rollout of verl's workers for weight updates in hybrid mode.

With `checkpoint_engine.backend: naive` verl passes the trainer's weights to every rank; rank 0
sends them to the servers.
"""

import os
from typing import Any

from verl.workers.rollout.base import BaseRollout

from coppice.errors import Unsupported
from coppice.verl.checkpoint import WIRE_FORMAT
from coppice.verl.publisher import Publisher, Weights, consume
from coppice.verl.server_list import ServerList

_MERGE = "set actor_rollout_ref.model.lora.merge=True, and whole weights are sent"


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """Rollout without local memory: `resume` and `release` do nothing, servers own their GPUs."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        per_replica = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self.replica_rank = rank // per_replica if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank == 0
        self._publisher = Publisher(ServerList.of(self.config.engine_kwargs))

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(
        self,
        weights: Weights,
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        if wire_format == WIRE_FORMAT:
            return  # the trainer's checkpoint engine has already sent them
        if wire_format != "named_tensors":
            raise Unsupported(f"weights as {wire_format} are not sent: use coppice or naive")
        if peft_config is not None:
            raise Unsupported(f"adapters are not sent by themselves: {_MERGE}")
        if self.is_leader_rank:
            await self._publisher.publish(weights, global_steps)
        else:
            await consume(weights)
