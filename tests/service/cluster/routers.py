"""Routers of other projects, as released, in front of the replicas of a test."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.ports import free_port
from tests.serving import TLS, Served
from tests.tools import ROOT

START_SECONDS = 60.0
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class RouterProgram:
    """A router's Python module, its policy with session affinity, and the header of the session."""

    module: str
    policy: str
    session_header: str
    num_healthy: Callable[[httpx.Response, int], int]
    health_path: str


def _num_healthy_of_vllm(answer: httpx.Response, num_replicas: int) -> int:
    """The router's /health is 503 if any replica is unhealthy, and lists these."""
    return num_replicas if answer.status_code == 200 else num_replicas - answer.text.count("http")


def _num_healthy_of_sglang(answer: httpx.Response, num_replicas: int) -> int:
    return sum(worker["is_healthy"] for worker in answer.json()["workers"])


VLLM_ROUTER = RouterProgram(
    module="vllm_router.launch_router",
    policy="consistent_hash",
    session_header="x-session-id",
    num_healthy=_num_healthy_of_vllm,
    health_path="/health",
)
SGLANG_ROUTER = RouterProgram(
    module="sglang_router.launch_router",
    policy="manual",
    session_header="x-smg-routing-key",
    num_healthy=_num_healthy_of_sglang,
    health_path="/workers",
)


@dataclass(frozen=True)
class Router:
    """A running router and the client `http` of its address."""

    program: RouterProgram
    http: httpx.AsyncClient
    num_replicas: int

    async def wait_until_healthy(self, num_replicas: int) -> None:
        """Waits until the router's health checks have found this number of healthy replicas."""
        async with asyncio.timeout(START_SECONDS):
            while await self._num_healthy() != num_replicas:
                await asyncio.sleep(POLL_SECONDS)

    async def _num_healthy(self) -> int:
        try:
            answer = await self.http.get(self.program.health_path)
        except httpx.TransportError:
            return -1  # the router does not listen yet
        return self.program.num_healthy(answer, self.num_replicas)


@asynccontextmanager
async def router(
    program: RouterProgram, log: Path, replicas: Sequence[Served]
) -> AsyncIterator[Router]:
    port = free_port()
    command = [sys.executable, "-m", program.module, "--policy", program.policy]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-urls", *(replica.url for replica in replicas)]
    command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"]
    # SGLang's router would load the model's tokenizer from the hub, and continues without it.
    variables = {"PYTHONPATH": str(ROOT / ".routers"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | variables, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=60, verify=TLS) as http:
            running = Router(program, http, len(replicas))
            await running.wait_until_healthy(len(replicas))
            yield running
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)
