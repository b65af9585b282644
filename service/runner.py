"""Runs the app under uvicorn from the first connection to the drained end."""

import asyncio
import json
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
import uvicorn
import uvloop
from fastapi import FastAPI

from engine.errors import StartFailed
from engine.protocol import Pulse
from service.settings import Settings

POLL_SECONDS = 0.1
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}

log = logging.getLogger(__name__)


def open_listener(host: str, port: int) -> socket.socket:
    """Listens at once, so that a second server for the same port fails before it loads a model."""
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


def curl_line(url: str) -> str:
    """A small rollout that works when pasted into a shell."""
    body = {
        "groups": [{"prompt": {"text": "Compute 12+34.\n"}, "n": 2}],
        "sampling": {"max_tokens": 64},
    }
    return f"curl -s {url}/v1/rollouts -H 'Content-Type: application/json' -d '{json.dumps(body)}'"


def run_server(
    app: FastAPI, pulse: Callable[[], Pulse], settings: Settings, listener: socket.socket
) -> None:
    """Returns when the server has drained. StartFailed when the engine never came to serve."""
    server = uvicorn.Server(_config(app, settings))
    with _signals_end_quietly(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            failure = runner.run(_serve(server, pulse, settings, listener))
        except SystemExit:  # uvicorn's answer to a failed lifespan
            failure = pulse().reason or "the log says why"
    if failure is not None:
        raise StartFailed(f"the engine did not start: {failure}")


def _config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=settings.limits.keep_alive_seconds,
        timeout_graceful_shutdown=settings.server.drain_seconds,
    )


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """uvicorn drains on these signals and then raises them anew, for whoever had them before."""
    taken = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _serve(
    server: uvicorn.Server, pulse: Callable[[], Pulse], settings: Settings, listener: socket.socket
) -> str | None:
    """Why the engine never came to serve; none: it did, or was stopped before."""
    async with asyncio.TaskGroup() as group:
        announcement = group.create_task(_announce(server, pulse, settings, listener))
        await server.serve(sockets=[listener])
        if announcement.done():
            return announcement.result()
        announcement.cancel()
    return None


async def _announce(
    server: uvicorn.Server, pulse: Callable[[], Pulse], settings: Settings, listener: socket.socket
) -> str | None:
    """Says once that the engine serves. If it dies on the way there: ends the server, says why."""
    url = server_url(listener)
    while not (server.started and pulse().stage == "serving"):
        if pulse().stage == "dead":
            server.should_exit = True
            return pulse().reason or "it died"
        await asyncio.sleep(POLL_SECONDS)
    if server.should_exit:
        return None
    log.info("ready: serving %s on %s", settings.engine.model, url)
    if settings.log.format == "human":
        typer.echo(f"\nTry it:\n\n  {curl_line(url)}\n\nCtrl-C stops the server.\n")
    return None
