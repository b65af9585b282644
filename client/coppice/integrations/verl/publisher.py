"""Upload and activation of a verl trainer's weights on all configured Coppice servers."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from coppice.client import AsyncRollouts
from coppice.integrations.weights_version_labels import LabelGenerator

MERGE_ADAPTER = (
    "adapters are not sent separately: set actor_rollout_ref.model.lora.merge=True, which sends the"
    " merged weights"
)
Weights = Iterable[tuple[str, Any]] | AsyncIterator[tuple[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerList:
    """URLs of the Coppice servers, from `engine_kwargs.coppice` of verl's configuration.

    The API key is in a file, since verl prints its configuration. With `return_support`, samples
    are requested with the supports of their tokens.
    """

    urls: tuple[str, ...]
    key_file: str | None = None
    return_support: bool = False

    @classmethod
    def of(cls, engine_kwargs: Mapping[str, Any]) -> Self:
        """Builds the server list from the `engine_kwargs` of verl's rollout configuration."""
        given = engine_kwargs.get("coppice") or {}
        return cls.given(
            given.get("urls") or (),
            given.get("key_file"),
            return_support=bool(given.get("return_support", False)),
        )

    @classmethod
    def given(cls, urls: Any, key_file: str | None, *, return_support: bool = False) -> Self:
        addresses = (urls,) if isinstance(urls, str) else tuple(urls)
        if not addresses:
            raise ValueError("engine_kwargs.coppice.urls is empty: list at least one server URL")
        return cls(urls=addresses, key_file=key_file, return_support=return_support)

    def url(self, replica: int) -> str:
        """URL of the server that a verl replica uses; several replicas may share a server."""
        return self.urls[replica % len(self.urls)]

    def key(self) -> str | None:
        return None if self.key_file is None else Path(self.key_file).read_text().strip()


class Publisher:
    """Publishes weights to all servers, in the one trainer process that sends them.

    The other processes call `consume`, because gathering the weights is a collective operation.
    """

    def __init__(self, server_list: ServerList) -> None:
        self._server_list = server_list
        self._labels = LabelGenerator("verl")

    async def publish(self, weights: Weights, global_steps: int | None) -> str:
        """Publishes the weights; returns the version once every server has activated it."""
        state: dict[str, Any] = {}
        async for name, tensor in _iterate(weights):
            # Gathered parameters are freed after their iteration.
            state[name] = tensor.detach().to("cpu", copy=True)
        label = self._labels.next(global_steps)
        sending = (self._send(url, label, state) for url in self._server_list.urls)
        # If one upload fails, the others still complete.
        for failed in await asyncio.gather(*sending, return_exceptions=True):
            if isinstance(failed, BaseException):
                raise failed
        return label

    async def _send(self, url: str, label: str, state: Mapping[str, Any]) -> None:
        async with AsyncRollouts(url, api_key=self._server_list.key()) as rollouts:
            await rollouts.publish_weights(label, state)


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
