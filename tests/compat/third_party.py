"""A server as seen by third-party clients: its compat answers are not in openapi.yaml."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute

from service.server import Server
from tests.fake_engine import FakeEngine
from tests.serving import serving


def wrong_status(path: str) -> int:
    """The status of an invalid request: OpenAI's routes answer 400."""
    return 400 if path in ("/v1/completions", "/v1/chat/completions") else 422


@dataclass(frozen=True)
class Foreign:
    http: httpx.AsyncClient
    server: Server
    engine: FakeEngine
    url: str
    app: FastAPI

    def routes(self) -> list[APIRoute]:
        """Routes of the main app and of the compat sub-application."""
        routes = [*self.app.routes, *self.app.state.compat.routes]
        return [route for route in routes if isinstance(route, APIRoute)]

    async def post(self, path: str, body: object = None, **options: Any) -> Any:
        """The body of a successful answer."""
        answer = await self.http.post(path, json=body, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refused(self, path: str, body: object = None, **options: Any) -> tuple[int, Any]:
        answer = await self.http.post(path, json=body, **options)
        problem = answer.json()
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.status_code == problem["status"]
        return answer.status_code, problem

    def ignored(self, kind: str) -> float:
        value = self.server.metrics.registry.get_sample_value(
            "coppice_compat_fields_total", {"kind": kind}
        )
        assert value is not None
        return value


@asynccontextmanager
async def foreign(
    tmp_path: Path, engine: FakeEngine | None = None, **sections: dict[str, Any]
) -> AsyncIterator[Foreign]:
    engine = engine or FakeEngine()
    async with (
        serving(engine, tmp_path, wait=True, port=0, shared=None, **sections) as served,
        httpx.AsyncClient(base_url=served.url, timeout=30) as http,
    ):
        yield Foreign(
            http=http, server=served.server, engine=engine, url=served.url, app=served.app
        )
