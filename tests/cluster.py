"""Several servers in one event loop that share one cluster registry."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from engine.protocol import Engine
from service.cluster.registry import ClusterRegistry, RegistryUnavailable
from tests.ports import free_port
from tests.serving import Served, serving


@asynccontextmanager
async def fleet(
    tmp_path: Path,
    engines: Sequence[Engine],
    shared: Callable[[], ClusterRegistry | None],
    **sections: dict[str, Any],
) -> AsyncIterator[list[Served]]:
    """Replicas that all see each other.

    `shared` makes each replica's registry; None: the one from the settings.
    """
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(
                replica(tmp_path / str(index), engine, shared(), **sections)
            )
            for index, engine in enumerate(engines)
        ]
        for served in replicas:
            await sees(served, len(replicas))
        yield replicas


async def sees(served: Served, num_replicas: int) -> None:
    """Waits until the replica sees this many. Retries while the registry is too slow to answer."""
    async with asyncio.timeout(30):
        while True:
            with suppress(RegistryUnavailable):
                if len((await served.server.cluster.refresh()).replicas) >= num_replicas:
                    return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def replica(
    tmp_path: Path,
    engine: Engine,
    shared: ClusterRegistry | None,
    wait: bool = True,
    /,
    **sections: dict[str, Any],
) -> AsyncIterator[Served]:
    port = free_port()
    server = sections.get("server", {}) | {"advertised_url": f"http://127.0.0.1:{port}"}
    sections = {**sections, "server": server}
    async with serving(engine, tmp_path, port=port, shared=shared, wait=wait, **sections) as served:
        yield served
