"""`coppice serve` on machines 1, 2, .. of a multi-machine engine: runs ranks and health probes.

The routes are a part of the contract's: /startupz, /readyz and /livez. The first signal waits
until machine 0 has drained and ended, for at most the time that both may take. The second signal
stops at once.
"""

import asyncio
import logging
import socket
from typing import Protocol

import uvloop
from fastapi import APIRouter, FastAPI, Response

from coppice.wire.status import HealthAnswer
from engine.errors import EngineDead
from engine.types.info import EngineHealth
from service.config.settings import Settings
from service.errors import EngineGone
from service.http.exception_handlers import problem_response
from service.http.responses import json_response
from service.http.serve import SignalFreeServer, server_config
from service.http.shutdown import signal_handlers
from service.readiness import starting

log = logging.getLogger(__name__)


class Node(Protocol):
    """Operations of `engine.launch.ranks.node_processes.EngineNode` that are used here."""

    def health(self) -> EngineHealth: ...

    async def run(self) -> str: ...

    async def stop(self) -> None: ...


def create_node_app(node: Node) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.include_router(_probes(node))
    return app


def _probes(node: Node) -> APIRouter:
    router = APIRouter()

    @router.get("/startupz")
    @router.get("/readyz")
    async def started() -> Response:
        health = node.health()
        if health.stage == "starting":
            return problem_response(starting(health).problem())
        return _health(node)

    @router.get("/livez")
    async def alive() -> Response:
        return _health(node)

    return router


def _health(node: Node) -> Response:
    health = node.health()
    if not health.alive:
        return problem_response(EngineGone(health.reason).problem())
    return json_response(HealthAnswer(stage=health.stage))


def run_node(node: Node, settings: Settings, listener: socket.socket) -> None:
    """Run the ranks and the probes until the engine ends.

    Raises EngineDead if it ends without a signal to this process, or StartFailed.
    """
    server = SignalFreeServer(server_config(create_node_app(node), settings, "off"))
    wait_seconds = settings.server.drain_seconds + settings.server.stop_seconds
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        reason = runner.run(_serve(server, node, listener, wait_seconds))
    if reason is not None:
        raise EngineDead(reason)


async def _serve(
    server: SignalFreeServer, node: Node, listener: socket.socket, wait_seconds: float
) -> str | None:
    running = asyncio.create_task(node.run(), name="engine-node")
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="probes")
    try:
        signals: asyncio.Queue[None] = asyncio.Queue()
        with signal_handlers(lambda: signals.put_nowait(None)):
            return await _wait_for_end(running, signals, wait_seconds)
    finally:
        running.cancel()
        await node.stop()
        server.should_exit = True
        await serving


async def _wait_for_end(
    running: asyncio.Task[str], signals: asyncio.Queue[None], wait_seconds: float
) -> str | None:
    """Wait for the engine's end. Returns its reason; None after a signal."""
    if await _finishes_before(running, signals, None):
        return running.result()
    log.info("waiting for the end of machine 0, for up to %.0f s", wait_seconds)
    await _finishes_before(running, signals, wait_seconds)
    return None


async def _finishes_before(
    running: asyncio.Task[str], signals: asyncio.Queue[None], seconds: float | None
) -> bool:
    """True if the task finishes before the next signal, and within the time."""
    signalled = asyncio.create_task(signals.get())
    try:
        await asyncio.wait(
            {running, signalled}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        return running.done()
    finally:
        signalled.cancel()
