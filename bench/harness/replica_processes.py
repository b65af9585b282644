"""Replicas of a cluster, each in a process, which are drained and started again."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.ports import free_port

NUM_REPLICAS = 2
START_SECONDS, STOP_SECONDS = 300.0, 120.0
CLUSTER = {
    "--engine.cpu-threads": 1,
    "--cluster.heartbeat-seconds": 0.5,
    "--cluster.expire-seconds": 4,
    "--weights.peers": "http://127.0.0.1:*",
}


@dataclass(slots=True)
class Replica:
    """A replica in a process, at the same address across restarts."""

    url: str
    command: list[str]
    log: Path
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self.command, start_new_session=True, stdout=output, stderr=output
            )
        async with asyncio.timeout(START_SECONDS), httpx.AsyncClient(timeout=10) as http:
            while not await _is_ready(http, self.url):
                assert self.process.returncode is None, self.log.read_text()[-2000:]
                await asyncio.sleep(0.2)

    async def drain(self) -> float:
        """Seconds from SIGTERM to the exit of the process."""
        assert self.process is not None, "the replica runs"
        began = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
        assert code == 0, self.log.read_text()[-2000:]
        return time.perf_counter() - began

    async def num_tokens(self) -> int:
        """Number of tokens that the engine has generated since the start of the process."""
        async with httpx.AsyncClient(timeout=30) as http:
            lines = (await http.get(f"{self.url}/metrics")).text.splitlines()
        counted = (line for line in lines if line.startswith("vllm:generation_tokens_total"))
        return int(sum(float(line.rpartition(" ")[2]) for line in counted))

    def end(self) -> None:
        if self.process is not None and self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)


async def _is_ready(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/readyz")).status_code == 200
    except httpx.TransportError:
        return False


@asynccontextmanager
async def replicas(
    redis_url: str, options: Mapping[str, object], *, log_directory: Path | None = None
) -> AsyncIterator[list[Replica]]:
    """Replicas with one Redis and the same options; their logs are kept in `log_directory`."""
    with tempfile.TemporaryDirectory() as folder:
        logs = log_directory or Path(folder)
        options = {**CLUSTER, "--cluster.redis-url": redis_url, **options}
        started = [_replica(options, Path(folder), logs, index) for index in range(NUM_REPLICAS)]
        try:
            await asyncio.gather(*(replica.start() for replica in started))
            await asyncio.sleep(1)  # a heartbeat of each, so that they see each other
            yield started
        finally:
            for replica in started:
                replica.end()


def _replica(options: Mapping[str, object], folder: Path, logs: Path, index: int) -> Replica:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    own = {
        "--server.port": port,
        "--server.advertised-url": url,
        "--weights.directory": folder / f"weights-{index}",
    }
    texts = [str(text) for option in {**options, **own}.items() for text in option]
    command = [sys.executable, "-m", "service", "serve", *texts]
    return Replica(url, command, logs / f"replica-{index}.log")
