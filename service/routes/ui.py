"""Routes under /ui: the dashboard page and its event stream.

The page itself holds no data and is public; the events need the role `watch`. The events are not
part of the API contract: only the page of the same version reads them.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from service.auth.access import page, public, requires_role
from service.http.responses import AUTH_ERRORS, declare_responses
from service.observability.dashboard_snapshot import snapshot
from service.routes.dependencies import AnyServer
from service.server import Server

router = APIRouter(prefix="/ui")

INTERVAL_SECONDS = 1.0
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@router.get("", responses=declare_responses({200: ["text/html"]}))
@page
async def shown() -> Response:
    return Response(_file("page.html"), media_type="text/html", headers=HEADERS)


@router.get("/page.js", responses=declare_responses({200: ["text/javascript"]}))
@public
async def script() -> Response:
    return Response(_file("page.js"), media_type="text/javascript", headers=HEADERS)


@router.get("/page.css", responses=declare_responses({200: ["text/css"]}))
@public
async def style() -> Response:
    return Response(_file("page.css"), media_type="text/css", headers=HEADERS)


@router.get("/events", responses=declare_responses({200: ["text/event-stream"]}, *AUTH_ERRORS))
@requires_role("watch")
async def events(server: AnyServer) -> Response:
    return StreamingResponse(_events(server), media_type="text/event-stream", headers=HEADERS)


async def _events(server: Server) -> AsyncIterator[str]:
    """Server-sent events with dashboard snapshots, until a disconnect or a drain."""
    while not server.readiness.draining:
        yield f"data: {json.dumps(snapshot(server))}\n\n"
        await asyncio.sleep(INTERVAL_SECONDS)


@cache
def _file(name: str) -> bytes:
    return (Path(__file__).parents[1] / "ui" / name).read_bytes()
