"""Servers that run in processes of their own: this service, and vLLM's OpenAI server."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil

START_SECONDS, STOP_SECONDS = 300.0, 60.0


@asynccontextmanager
async def coppice_server(
    options: Mapping[str, object], *, log: Path | None = None, module: str = "service"
) -> AsyncIterator[str]:
    """URL of this service, started with these options; its output goes to `log`, if given.

    `module` is another main module with the same command line.
    """
    command = [sys.executable, "-m", module, "serve"]
    async with _server(command, options, {}, log=log) as url:
        yield url


@asynccontextmanager
async def vllm_server(
    options: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> AsyncIterator[str]:
    """URL of vLLM's OpenAI server, without the plugin of this project.

    `environment` has further variables of its processes.
    """
    # The command `vllm serve` needs a package named vllm, which CPU builds are not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    rest = {"--disable-uvicorn-access-log": None, **options}
    variables = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_SERVER_DEV_MODE": "1",  # routes that replace the weights
        **(environment or {}),
    }
    async with _server(command, rest, variables) as url:
        yield url


def processor_seconds(url: str) -> float:
    """Processor time that the server at this URL and its children have used so far."""
    server = process_of(url)
    times = [process.cpu_times() for process in (server, *server.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def process_of(url: str) -> psutil.Process:
    """The process that listens at this URL."""
    port = httpx.URL(url).port
    [pid] = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
    }
    return psutil.Process(pid)


@asynccontextmanager
async def _server(
    command: list[str],
    options: Mapping[str, object],
    environment: Mapping[str, str],
    *,
    log: Path | None = None,
) -> AsyncIterator[str]:
    """A server process on a free port; it is ended, with its children, on exit.

    An option whose value is None is a flag.
    """
    port = _free_port()
    named = {"--port": port, **options}.items()
    texts = [str(text) for option in named for text in option if text is not None]
    with open(os.devnull if log is None else log, "wb") as output:
        written = None if log is None else output
        server = await asyncio.create_subprocess_exec(
            *command,
            *texts,
            env=_inherited() | dict(environment),
            start_new_session=True,
            stdout=written,
            stderr=written,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        await _ready(server, url)
        yield url
    finally:
        await _end(server)


def _inherited() -> dict[str, str]:
    """Variables of this process, without one of the tests: stock vLLM does not start with it."""
    return {name: text for name, text in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}


async def _ready(server: asyncio.subprocess.Process, url: str) -> None:
    async with asyncio.timeout(START_SECONDS), httpx.AsyncClient() as client:
        while True:
            assert server.returncode is None, "the server did not start"
            try:
                if (await client.get(f"{url}/v1/models")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.5)


async def _end(server: asyncio.subprocess.Process) -> None:
    if server.returncode is None:
        server.terminate()
    try:
        await asyncio.wait_for(server.wait(), STOP_SECONDS)
    except TimeoutError:
        os.killpg(server.pid, signal.SIGKILL)
        await server.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
