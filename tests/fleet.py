"""Several servers in one event loop, over one directory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from engine.protocol import Engine
from service.directory.directory import Directory
from tests.redis_server import free_port
from tests.serving import Served, serving


@asynccontextmanager
async def fleet(
    tmp_path: Path,
    engines: Sequence[Engine],
    shared: Callable[[], Directory | None],
    **sections: dict[str, Any],
) -> AsyncIterator[list[Served]]:
    """`shared` makes each replica's; None: what the settings say. Each sees all the others."""
    async with AsyncExitStack() as stack:
        replicas = [
            await stack.enter_async_context(
                replica(tmp_path / str(index), engine, shared(), **sections)
            )
            for index, engine in enumerate(engines)
        ]
        for served in replicas:
            while len((await served.server.fleet.seen()).replicas) < len(replicas):
                await asyncio.sleep(0.01)
        yield replicas


@asynccontextmanager
async def replica(
    tmp_path: Path,
    engine: Engine,
    shared: Directory | None,
    wait: bool = True,
    /,
    **sections: dict[str, Any],
) -> AsyncIterator[Served]:
    port = free_port()
    server = sections.get("server", {}) | {"advertised_url": f"http://127.0.0.1:{port}"}
    sections = {**sections, "server": server}
    async with serving(engine, tmp_path, port=port, shared=shared, wait=wait, **sections) as served:
        yield served
