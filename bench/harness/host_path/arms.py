"""Arms of the host path's benchmark: servers with one model, and what a load takes in each.

Times of a server are processor times of its processes. The client has a process of its own.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from bench.harness.host_path.limits import MODEL, our_settings, vllm_arguments
from bench.harness.host_path.loads import Load
from bench.harness.server_process import coppice_server, process_of, vllm_server

PACKED, OUR_JSON, OUR_STREAM = "ours, packed", "ours, JSON", "ours, streamed"
OUR_COMPLETIONS = "ours, completions"
VLLM, VLLM_STREAM = "vllm serve, completions", "vllm serve, streamed completions"
GENERATE = "vllm serve, generate"
OUR_ENGINE, ASYNC_LLM = "our engine alone", "AsyncLLM alone"
OUR_ROUTES: Final = {
    PACKED: "packed",
    OUR_JSON: "json",
    OUR_STREAM: "stream",
    OUR_COMPLETIONS: "completions",
}
VLLM_ROUTES: Final = {
    VLLM: "completions",
    VLLM_STREAM: "completions stream",
    GENERATE: "generate",
}
NULL_SERVER = "bench.harness.host_path.null_server"
NULL_EXECUTOR = "bench.harness.host_path.null_executor.NullExecutor"
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""vLLM's executor for one GPU. By this name vLLM accepts it on a CPU, too, as this server does."""
ENGINE_CORE = "VLLM::EngineCo"
"""Begin of the name of EngineCore's process, as far as Linux keeps it."""
VLLM_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of a load. Times are microseconds of processor time per token."""

    tokens_per_second: float
    core_us: float
    service_us: float
    bytes_per_token: float
    p99_gap_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to generate the samples of a load, and its measurements by the name of the load."""

    name: str
    job: Mapping[str, Any]
    client: "JobProcess"
    server: psutil.Process
    measured: dict[str, list[Measurement]] = field(default_factory=dict)

    async def run(self, load: Load) -> None:
        await self.client.prepare(dict(self.job) | {"load": asdict(load)})
        before = _processor_seconds(self.server)
        result = await self.client.go()
        core, service = (
            1e6 * (after - begin) / load.num_tokens
            for begin, after in zip(before, _processor_seconds(self.server), strict=True)
        )
        gap = result["p99_gap_seconds"]
        self.measured.setdefault(load.name, []).append(
            Measurement(
                tokens_per_second=load.num_tokens / result["seconds"],
                core_us=core,
                service_us=service,
                bytes_per_token=result["num_bytes"] / load.num_tokens,
                p99_gap_ms=None if gap is None else 1000 * gap,
            )
        )

    def values(self, load: Load, quantity: str) -> list[float]:
        """Values of all runs but the first, which is the warm-up."""
        return [float(getattr(run, quantity)) for run in self.measured[load.name][1:]]


def _processor_seconds(server: psutil.Process) -> tuple[float, float]:
    """Processor time of EngineCore and of all other processes of a server, so far."""
    core = service = 0.0
    for process in (server, *server.children(recursive=True)):
        times = process.cpu_times()
        if process.name().startswith(ENGINE_CORE):
            core += times.user + times.system
        else:
            service += times.user + times.system
    assert core, "EngineCore has another name"
    return core, service


class JobProcess:
    """Process that takes jobs: `prepare` starts one, which waits for `go`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def prepare(self, job: Mapping[str, Any]) -> None:
        await self._write(json.dumps(job))
        await self.read()

    async def go(self) -> dict[str, Any]:
        await self._write("")
        found: dict[str, Any] = json.loads(await self.read())
        return found

    async def read(self) -> str:
        assert self._process.stdout
        line = await self._process.stdout.readline()
        assert line, "the process has ended"
        return line.decode()

    async def _write(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line.encode() + b"\n")
        await self._process.stdin.drain()


JobContext = AbstractAsyncContextManager[JobProcess]


@asynccontextmanager
async def job_process(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[JobProcess]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"bench.harness.host_path.{module}", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ) | dict(environment or {}),
    )
    try:
        yield JobProcess(process)
    finally:
        assert process.stdin
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def arms(
    model: Path, names: Collection[str], *, computes: bool, **options: object
) -> AsyncIterator[dict[str, Arm]]:
    """The named arms, with the processes that they need.

    Without `computes` all have the null executor. `options` are further ones of this server.
    """
    found: dict[str, Arm] = {}
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(job_process("client_process"))
        starting = [
            stack.enter_async_context(start)
            for start, of_them in (
                (_our_server_arms(client, model, options, computes=computes), OUR_ROUTES),
                (_vllm_server_arms(client, model, computes=computes), VLLM_ROUTES),
                (_engine_arm(OUR_ENGINE, _our_engine(model, computes=computes)), [OUR_ENGINE]),
                (_engine_arm(ASYNC_LLM, _async_llm(model, computes=computes)), [ASYNC_LLM]),
            )
            if not set(of_them).isdisjoint(names)
        ]
        for started in await asyncio.gather(*starting):
            found |= {name: arm for name, arm in started.items() if name in names}
        yield found


def _vllm_arguments(model: Path, *, computes: bool) -> dict[str, Any]:
    executor = ONE_PROCESS if computes else NULL_EXECUTOR
    return {**vllm_arguments(model), "distributed_executor_backend": executor}


@asynccontextmanager
async def _our_server_arms(
    client: JobProcess, model: Path, options: Mapping[str, object], *, computes: bool
) -> AsyncIterator[dict[str, Arm]]:
    settings = our_settings(model).items()
    named = {f"--engine.{name.replace('_', '-')}": value for name, value in settings}
    module = "service" if computes else NULL_SERVER
    log = Path(os.devnull)
    async with coppice_server({**named, **options}, log=log, module=module) as url:
        yield _http_arms(client, url, OUR_ROUTES)


@asynccontextmanager
async def _vllm_server_arms(
    client: JobProcess, model: Path, *, computes: bool
) -> AsyncIterator[dict[str, Arm]]:
    arguments = _vllm_arguments(model, computes=computes) | {
        "served_model_name": MODEL,
        "enable_scale_out": True,
        "uvicorn_log_level": "warning",
    }
    options = {
        f"--{name.replace('_', '-')}": None if value is True else value
        for name, value in arguments.items()
    }
    async with vllm_server(options, VLLM_ENVIRONMENT) as url:
        yield _http_arms(client, url, VLLM_ROUTES)


def _our_engine(model: Path, *, computes: bool) -> JobContext:
    settings = json.dumps(our_settings(model))
    return job_process("engine_process", "ours" if computes else "ours-null", settings)


def _async_llm(model: Path, *, computes: bool) -> JobContext:
    arguments = json.dumps(_vllm_arguments(model, computes=computes))
    variables = VLLM_ENVIRONMENT | {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    return job_process("engine_process", "vllm", arguments, environment=variables)


@asynccontextmanager
async def _engine_arm(name: str, starting: JobContext) -> AsyncIterator[dict[str, Arm]]:
    async with starting as process:
        await process.read()
        yield {name: Arm(name=name, job={}, client=process, server=psutil.Process(process.pid))}


def _http_arms(client: JobProcess, url: str, routes: Mapping[str, str]) -> dict[str, Arm]:
    server = process_of(url)
    return {
        name: Arm(
            name=name,
            job={"url": url, "model": MODEL, "route": route},
            client=client,
            server=server,
        )
        for name, route in routes.items()
    }
