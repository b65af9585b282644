"""verl's `checkpoint_engine.backend: coppice`: weights over HTTP, directly to the servers.

verl's rollout workers receive nothing and need no GPU.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngine

from coppice.verl.publisher import Publisher, Weights, consume
from coppice.verl.server_list import ServerList

WIRE_FORMAT = "coppice"

Topology = tuple[dict[str, list[Any]], dict[str, list[Any]]]


class HttpCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Checkpoint engine of one worker; only the trainer's rank 0, the master, sends."""

    wire_format = WIRE_FORMAT

    def __init__(
        self,
        bucket_size: int,
        urls: Sequence[str] = (),
        key_file: str | None = None,
        is_master: bool = False,
    ) -> None:
        self._publisher = Publisher(ServerList.given(urls, key_file)) if is_master else None

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> Topology:
        """Empty topology: workers do not communicate with each other."""
        return {}, {}

    def init_process_group(self) -> None:
        """Does nothing: there is no process group."""

    def finalize(self) -> None:
        """Does nothing: there is no state between two updates."""

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> None:
        """Returns when all servers have activated the weights."""
        if self._publisher is None:
            await consume(weights)
        else:
            await self._publisher.publish(weights, global_steps)

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[str, Any]]:
        """Yields nothing: the weights were sent to the server."""
        return iter(())
