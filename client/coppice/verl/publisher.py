"""Publication of a trainer's weights: written to one file, sent to every server."""

import asyncio
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from coppice.client import AsyncRollouts
from coppice.verl.labels import VersionLabels
from coppice.verl.server_list import ServerList
from coppice.weights.tensor import tensors_of
from coppice.weights.writer import write_safetensors

Weights = Iterable[tuple[str, Any]] | AsyncIterator[tuple[str, Any]]


class Publisher:
    """Publisher of weights to all servers, in the one trainer process that sends them.

    The other processes call `consume`, because gathering the weights is a collective operation.
    """

    def __init__(self, server_list: ServerList) -> None:
        self._server_list = server_list
        self._labels = VersionLabels()

    async def publish(self, weights: Weights, global_steps: int | None) -> str:
        """Publishes the weights; returns the version once every server has activated it."""
        state: dict[str, Any] = {}
        async for name, tensor in _iterate(weights):
            # Gathered parameters are freed after their iteration.
            state[name] = tensor.detach().to("cpu", copy=True)
        label = self._labels.next(global_steps)
        with tempfile.TemporaryDirectory(prefix="coppice-") as folder:
            path = Path(folder) / "model.safetensors"
            await asyncio.to_thread(deque, write_safetensors(path, tensors_of(state)), 0)
            sending = (self._send(url, label, path) for url in self._server_list.urls)
            # If one upload fails, the others still complete.
            for failed in await asyncio.gather(*sending, return_exceptions=True):
                if isinstance(failed, BaseException):
                    raise failed
        return label

    async def _send(self, url: str, label: str, path: Path) -> None:
        async with AsyncRollouts(url, api_key=self._server_list.key()) as rollouts:
            await rollouts.publish_weights(label, path)


async def consume(weights: Weights) -> None:
    async for _ in _iterate(weights):
        pass


async def _iterate(weights: Weights) -> AsyncIterator[tuple[str, Any]]:
    if isinstance(weights, AsyncIterator):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item
