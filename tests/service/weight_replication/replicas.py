"""Replicas in one event loop that replicate weights through one registry, and their requests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors.numpy import save

from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import (
    ActivationTarget,
    ClusterView,
    Manifest,
    RegistryUnavailable,
    Replica,
)
from service.errors import NotReady
from tests.cluster import fleet
from tests.fake_engine import FakeEngine
from tests.serving import Served

OLD = save({"a": np.linspace(0, 1, 3000, dtype=np.float32)})
NEW = save({"a": np.linspace(0, 1, 3000, dtype=np.float32) * np.float32(1 + 1e-6)})
T = TypeVar("T")
LOOPBACK = "http://127.0.0.0/8:*"
# Long enough that a stalled machine expires no replica.
DIRECTORY = {"heartbeat_seconds": 0.1, "expire_seconds": 30.0}


class Faulty(InMemoryRegistry):
    """`silent`: every call fails without an answer."""

    silent = False

    async def beat(self, replica: Replica, *, ttl_seconds: float) -> ClusterView:
        return await self._heard(super().beat(replica, ttl_seconds=ttl_seconds))

    async def publish(self, manifest: Manifest) -> None:
        await self._heard(super().publish(manifest))

    async def set_target(self, target: ActivationTarget) -> ActivationTarget:
        return await self._heard(super().set_target(target))

    async def _heard(self, work: Coroutine[Any, Any, T]) -> T:
        if self.silent:
            work.close()
            raise RegistryUnavailable("silent")
        return await work

    @property
    def target_version(self) -> str | None:
        return None if self._target is None else self._target.version

    def forget(self) -> None:
        self._manifests.clear()
        self._replicas.clear()
        self._target = None


def sections(**weights: Any) -> dict[str, dict[str, Any]]:
    return {
        "weights": {"peers": (LOOPBACK,), "replication_seconds": 20.0, **weights},
        "cluster": dict(DIRECTORY),
    }


@asynccontextmanager
async def several(
    tmp_path: Path, num: int, directory: InMemoryRegistry | None = None, **weights: Any
) -> AsyncIterator[tuple[list[Served], list[FakeEngine]]]:
    shared = directory or InMemoryRegistry()
    engines = [FakeEngine() for _ in range(num)]
    async with fleet(tmp_path, engines, lambda: shared, **sections(**weights)) as replicas:
        yield replicas, engines


async def activate(served: Served, version: str, **asked: Any) -> Any:
    return await served.http.post(f"/v1/weights/{version}/activate", json=asked)


async def listed(served: Served) -> Any:
    return (await served.http.get("/v1/weights")).json()


async def eventually(holds: Callable[[], bool], ttl_seconds: float = 20.0) -> None:
    async with asyncio.timeout(ttl_seconds):
        while not holds():
            await asyncio.sleep(0.01)


def is_ready(served: Served) -> bool:
    try:
        served.server.readiness.check_ready()
    except NotReady:
        return False
    return True


def serves(served: Served, version: str) -> bool:
    return served.server.versions.active.label == version


def fetches(served: Served, source: str) -> float:
    value = served.server.metrics.registry.get_sample_value(
        "coppice_weights_fetches_total", {"source": source}
    )
    assert value is not None
    return value


def loaded(engine: FakeEngine) -> bytes:
    return (engine.loaded[-1] / "model.safetensors").read_bytes()
