"""verl plugin that registers Coppice as a rollout and as a checkpoint engine.

With coppice-client installed, verl loads it through an entry point; otherwise set
VERL_USE_EXTERNAL_MODULES=coppice.integrations.verl.plugin, so that every process imports it.
It registers the rollout `coppice`, with its replicas and workers, and the checkpoint engine
`coppice`.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.config import DistillationTeacherModelConfig
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplicaRegistry

from coppice.errors import Unsupported
from coppice.integrations.verl import support_replay
from coppice.integrations.verl.publisher import (
    MERGE_ADAPTER,
    Publisher,
    ServerList,
    Weights,
    consume,
)

Topology = tuple[dict[str, list[Any]], dict[str, list[Any]]]
NAME = "coppice"


class HttpCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """verl checkpoint engine (`backend: coppice`) that sends weights to the servers over HTTP.

    There is one per worker; only the trainer's rank 0, the master, sends. verl's rollout workers
    receive nothing and need no GPU.
    """

    wire_format = NAME

    def __init__(
        self,
        bucket_size: int,
        urls: Sequence[str] = (),
        key_file: str | None = None,
        is_master: bool = False,
        return_support: bool = False,
    ) -> None:
        if return_support:
            support_replay.install()
        self._publisher = Publisher(ServerList.given(urls, key_file)) if is_master else None

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> Topology:
        """Returns an empty topology, because workers do not exchange weights with each other."""
        return {}, {}

    def init_process_group(self) -> None:
        """Does nothing, because weights are sent over HTTP, without a process group."""

    def finalize(self) -> None:
        """Does nothing, because there is no state between two weight updates."""

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:
        """Sends the weights to all servers; returns when every server has activated them."""
        if self._publisher is None:
            await consume(weights)
        else:
            await self._publisher.publish(weights, global_steps)

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, Any]]:
        """Yields nothing, because the trainer sends the weights directly to the servers."""
        return iter(())


class ServerAdapter(BaseRollout):  # type: ignore[misc]
    """verl rollout worker that only forwards weight updates to the servers, in hybrid mode.

    With `checkpoint_engine.backend: naive` verl passes the trainer's weights to every rank; rank 0
    sends them to the servers. `resume` and `release` do nothing, because servers own their GPUs.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        per_replica = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self.replica_rank = rank // per_replica if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank == 0
        servers = ServerList.of(self.config.engine_kwargs)
        self._publisher = Publisher(servers)
        if servers.return_support:
            support_replay.install()

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
        if wire_format == NAME:
            return  # the trainer's checkpoint engine has already sent them
        if wire_format != "named_tensors":
            raise Unsupported(
                f"weights as {wire_format} are not supported: use the backend coppice or naive"
            )
        if peft_config is not None:
            raise Unsupported(MERGE_ADAPTER)
        if self.is_leader_rank:
            await self._publisher.publish(weights, global_steps)
        else:
            await consume(weights)


def _replica() -> type:
    from coppice.integrations.verl.replica import CoppiceReplica

    return CoppiceReplica


def _accept_teachers() -> None:
    """Accepts the rollout coppice for teachers whose top logprobs are distilled.

    verl refuses rollouts that it does not know. The server's limit is `engine.max_logprobs`.
    """
    original = DistillationTeacherModelConfig._validate_topk_logprobs

    def validate(self: Any, use_topk: bool, topk: int | None) -> None:
        if self.inference.name != NAME:
            original(self, use_topk, topk)
        elif use_topk and topk is None:
            raise ValueError("topk must be specified when use_topk is True.")

    DistillationTeacherModelConfig._validate_topk_logprobs = validate


RolloutReplicaRegistry.register(NAME, _replica)
CheckpointEngineRegistry.register(NAME)(HttpCheckpointEngine)
# verl has no public registry of BaseRollout classes.
base._ROLLOUT_REGISTRY[NAME, "async"] = "coppice.integrations.verl.plugin.ServerAdapter"
_accept_teachers()
support_replay.keep_supports()
