"""uvicorn servers of the app: listening sockets, the operators' port, tuning of the process.

The first signal drains and stops the server, the second stops it at once. The server listens during
the drain: new requests get a 503 instead of a refused connection, and waiting requests are still
answered.
"""

import asyncio
import gc
import json
import logging
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Literal

import uvicorn
import uvloop
from fastapi import FastAPI

from engine.errors import StartFailed
from service.config.settings import Settings
from service.http.limited_protocol import protocol_with_limits
from service.http.open_file_limit import connection_limit
from service.http.shutdown import (
    GracefulShutdown,
    ServerLifecycle,
    StopDeadline,
    signal_handlers,
)

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005
"""GIL switch interval: how long a busy thread keeps the GIL while the event loop waits for it.

The loop re-acquires the GIL after every system call. With the default of 5 ms a request of ten
calls takes 50 ms.
"""
COLLECT_SECONDS = 60.0
NEVER = 2**30
POLL_SECONDS = 0.1
GRACEFUL_SHUTDOWN_SECONDS = 10  # for responses still being sent after the drain
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


async def tuned(collect_seconds: float = COLLECT_SECONDS) -> None:
    """Set the garbage collector and the GIL switch interval for serving, until cancelled.

    Run one such task per process.

    CPython runs a full garbage collection whenever the heap has grown by a quarter. During a
    rollout of 65,536 samples that causes eight pauses, each longer than the one before, up to
    0.5 s. Here full collections run at fixed intervals; the young generations are collected as
    usual.
    """
    (young, middle, old), switch = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(young, middle, NEVER)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        while True:
            await asyncio.sleep(collect_seconds)
            gc.collect()
    finally:
        gc.set_threshold(young, middle, old)
        sys.setswitchinterval(switch)


def open_listener(host: str, port: int) -> socket.socket:
    """Open the listening socket of a host and port.

    It listens at once, so that a second server for the same port fails before it loads a model.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartFailed(f"cannot listen on {host}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise StartFailed(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


def server_url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    host = _WILDCARDS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def example_command(url: str) -> str:
    """Shell command (curl) that requests a small rollout, as an example for users."""
    body = {
        "groups": [{"prompt": {"text": "Compute 12+34.\n"}, "n": 2}],
        "sampling": {"max_tokens": 64},
    }
    return f"curl -s {url}/v1/rollouts -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


class SignalFreeServer(uvicorn.Server):
    """uvicorn server without signal handlers.

    uvicorn's own handler would stop listening at the first signal, before the drain.
    """

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_server(
    app: FastAPI,
    lifecycle: ServerLifecycle,
    settings: Settings,
    listener: socket.socket,
    deadline: StopDeadline | None = None,
) -> None:
    """Run the HTTP server until a signal has drained and stopped it.

    The deadline also limits the time from the return of this function to the exit. Raises
    StartFailed if the engine did not start.
    """
    server = SignalFreeServer(server_config(app, settings, "on"))
    with (
        _operators(app, settings) as operators,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        try:
            failure = runner.run(_serve(server, lifecycle, settings, listener, operators, deadline))
        except SystemExit:  # uvicorn exits when the lifespan's startup fails
            failure = lifecycle.health().reason or "see the log"
    if failure is not None:
        raise StartFailed(f"the engine did not start: {failure}")


class OperatorsServer(SignalFreeServer):
    """uvicorn server of the separate port for operators; runs as long as the main server."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.serve(sockets=[self._listener]))
        try:
            yield
        finally:
            self.should_exit = True
            await task


@contextmanager
def _operators(app: FastAPI, settings: Settings) -> Iterator[OperatorsServer | None]:
    host, port = settings.server.operators_host, settings.server.operators_port
    if port is None:
        yield None
        return
    with open_listener(host, port) as listener:
        log.info("serving operators on %s", server_url(listener))
        yield OperatorsServer(server_config(app.state.operators, settings, "off"), listener)


def server_config(
    app: FastAPI, settings: Settings, lifespan: Literal["on", "off"]
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol_with_limits(settings.limits),
        limit_concurrency=connection_limit(settings.limits.max_connections) + 1,
        ws="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=settings.limits.keep_alive_seconds,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_SECONDS,
    )


async def _serve(
    server: SignalFreeServer,
    lifecycle: ServerLifecycle,
    settings: Settings,
    listener: socket.socket,
    operators: OperatorsServer | None,
    deadline: StopDeadline | None,
) -> str | None:
    """Serve HTTP until shutdown, with signal handlers and the operators' server.

    Returns the reason why the engine did not start; None if it started or was stopped before.
    """
    drain_seconds = settings.server.drain_seconds
    shutdown = GracefulShutdown(lifecycle, server, drain_seconds=drain_seconds, deadline=deadline)
    async with asyncio.TaskGroup() as group:
        ready_task = group.create_task(_log_when_ready(server, lifecycle, settings, listener))
        tuning = group.create_task(tuned())
        with signal_handlers(shutdown.on_signal):
            async with operators.running() if operators else nullcontext():
                await server.serve(sockets=[listener])
        tuning.cancel()
        if ready_task.done():
            return ready_task.result()
        ready_task.cancel()
    return None


async def _log_when_ready(
    server: SignalFreeServer,
    lifecycle: ServerLifecycle,
    settings: Settings,
    listener: socket.socket,
) -> str | None:
    """Wait until requests are accepted, then log that the server is ready.

    If the engine dies during the start, stops the server and returns the reason.
    """
    url = server_url(listener)
    while not (server.started and lifecycle.is_ready()):
        if server.should_exit:
            return None
        if lifecycle.health().stage == "dead":
            server.should_exit = True
            return lifecycle.health().reason or "the engine died"
        await asyncio.sleep(POLL_SECONDS)
    log.info("ready: serving %s on %s", settings.engine.model, url)
    if settings.log.format == "human":
        print(f"\nTry it:\n\n  {example_command(url)}\n\nCtrl-C stops the server.\n", flush=True)
    return None
