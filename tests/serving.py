"""A server on a real socket inside the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from engine.protocol import Engine
from service.app import create_app
from service.server import Server
from service.settings import Settings


@dataclass(frozen=True)
class Served:
    """`http` speaks to the server; `server` is the thing itself."""

    http: httpx.AsyncClient
    server: Server
    url: str


def settings_for(tmp_path: Path, **sections: dict[str, Any]) -> Settings:
    weights = {"directory": tmp_path / "weights", **sections.pop("weights", {})}
    return Settings.model_validate({"weights": weights, **sections})


@asynccontextmanager
async def serving(
    engine: Engine, tmp_path: Path, *, wait: bool = True, **sections: dict[str, Any]
) -> AsyncIterator[Served]:
    app = create_app(settings_for(tmp_path, **sections), engine)
    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="on", ws="none")
    listener = uvicorn.Server(config)
    task = asyncio.create_task(listener.serve())
    try:
        while not listener.started:
            await asyncio.sleep(0.001)
        port = listener.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            while wait and (await http.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.01)
            yield Served(http=http, server=app.state.server, url=url)
    finally:
        listener.should_exit = True
        await task
