"""Routes under /ui: the live dashboard page and its event stream.

The page itself holds no data and is public; the events need the role `watch`. The events are not
part of the API contract: only the page of the same version reads them.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from service.auth.access import page, public, requires_role
from service.http.responses import AUTH_ERRORS, declare_responses
from service.routes.dependencies import AnyServer
from service.server import Server
from service.status.dashboard_snapshot import INTERVAL_SECONDS, Snapshots

router = APIRouter(prefix="/ui")

SCRIPT_RESPONSES = declare_responses({200: ["text/javascript"]})
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


@router.get("/page.js", responses=SCRIPT_RESPONSES)
@router.get("/charts.js", responses=SCRIPT_RESPONSES)
@router.get("/rollouts.js", responses=SCRIPT_RESPONSES)
@router.get("/versions.js", responses=SCRIPT_RESPONSES)
@public
async def script(request: Request) -> Response:
    name = request.url.path.rpartition("/")[2]
    return Response(_file(name), media_type="text/javascript", headers=HEADERS)


@router.get("/page.css", responses=declare_responses({200: ["text/css"]}))
@public
async def style() -> Response:
    return Response(_file("page.css"), media_type="text/css", headers=HEADERS)


@router.get("/events", responses=declare_responses({200: ["text/event-stream"]}, *AUTH_ERRORS))
@requires_role("watch")
async def events(request: Request, server: AnyServer) -> Response:
    stream = _events(server, request.app.state.snapshots)
    return StreamingResponse(stream, media_type="text/event-stream", headers=HEADERS)


async def _events(server: Server, snapshots: Snapshots) -> AsyncIterator[str]:
    """Server-sent events with snapshots, until a disconnect or a drain."""
    is_last = False
    while not is_last:
        is_last = server.readiness.draining
        yield f"data: {snapshots.latest()}\n\n"
        await asyncio.sleep(0 if is_last else INTERVAL_SECONDS)


@cache
def _file(name: str) -> bytes:
    return (Path(__file__).parents[1] / "ui" / name).read_bytes()
