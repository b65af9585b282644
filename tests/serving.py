"""A server on a real socket inside the test's own event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from engine.protocol import Engine
from service.app import create_app
from service.cluster.registry import ClusterRegistry
from service.config.settings import Settings
from service.http.limited_protocol import protocol_with_limits
from service.http.open_file_limit import connection_limit
from service.http.serve import SignalFreeServer
from service.server import Server
from tests.contract.recorded import Recorded

START_SECONDS = 120.0
READY_SECONDS = 600.0  # a real engine on a busy machine

TLS = httpx.create_ssl_context()  # creating a TLS context takes 30 ms per client


class PromptListener(SignalFreeServer):
    """A uvicorn server that stops without polling.

    uvicorn polls its stop flag ten times per second; over a thousand tests that adds up to minutes.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.leave = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.leave.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.001)
        for server in self.servers:
            await server.wait_closed()
        await self.lifespan.shutdown()


@dataclass(frozen=True)
class Served:
    """A running server with its client `http`, its `server` object and its open `connections`."""

    http: httpx.AsyncClient
    server: Server
    url: str
    app: FastAPI
    connections: Collection[object]


def settings_for(tmp_path: Path, **sections: dict[str, Any]) -> Settings:
    sections.setdefault("kv", {}).setdefault("capacity_bytes", 2**20)
    weights = {"directory": tmp_path / "weights", **sections.pop("weights", {})}
    return Settings.model_validate({"weights": weights, **sections})


@asynccontextmanager
async def serving(
    engine: Engine,
    tmp_path: Path,
    /,
    *,
    wait: bool = True,
    port: int = 0,
    shared: ClusterRegistry | None = None,
    **sections: dict[str, Any],
) -> AsyncIterator[Served]:
    settings = settings_for(tmp_path, **sections)
    app = create_app(settings, engine, shared)
    config = uvicorn.Config(
        app,
        http=protocol_with_limits(settings.limits),
        limit_concurrency=connection_limit(settings.limits.max_connections) + 1,
        timeout_keep_alive=settings.limits.keep_alive_seconds,
        port=port,
        log_level="warning",
        lifespan="on",
        ws="none",
        server_header=False,
    )
    listener = PromptListener(config)
    task = asyncio.create_task(listener.serve())
    try:
        async with asyncio.timeout(START_SECONDS):
            while not listener.started:
                assert not task.done(), "it did not start"
                await asyncio.sleep(0.001)
        port = listener.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        transport = Recorded(httpx.AsyncHTTPTransport(verify=TLS))
        async with httpx.AsyncClient(base_url=url, timeout=60, transport=transport) as http:
            async with asyncio.timeout(READY_SECONDS):
                while wait and (await http.get("/readyz")).status_code != 200:
                    await asyncio.sleep(0.01)
            yield Served(
                http=http,
                server=app.state.server,
                url=url,
                app=app,
                connections=listener.server_state.connections,
            )
    finally:
        listener.leave.set()
        await task
