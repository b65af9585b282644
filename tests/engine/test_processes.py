"""Start and end of the engine's processes, with real signals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from engine.errors import EngineDead, StartFailed
from engine.runtime import leftover_files
from engine.types.samples import Completion, SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from tests.engine.seedling import MODEL, settings
from tests.engine.slow_load import LOAD_SECONDS

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
STEP_SECONDS = 3.0
SOON_SECONDS = 60.0  # on a busy machine


@asynccontextmanager
async def started(*, worker: str | None = None, **changes: Any) -> AsyncIterator[VllmEngine]:
    chosen = settings(step_seconds=STEP_SECONDS, **changes)
    engine = VllmEngine(chosen, worker_extension=worker) if worker else VllmEngine(chosen)
    try:
        await engine.start("v0")
        yield engine
    finally:
        await engine.stop()


def processes(name: str) -> list[psutil.Process]:
    """Child processes with this name. Those that exit during the listing are skipped."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if name in process.name():
                found.append(process)
    return found


async def until(condition: Callable[[], bool], *, seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


async def one_sample(engine: VllmEngine, max_tokens: int) -> Completion:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    request = SampleRequest(
        id=f"p{time.monotonic_ns()}", prompt_token_ids=[1, 2, 3], sampling=sampling
    )
    (pending,) = await engine.submit([request])
    return await pending


async def test_pipeline_parallelism_is_refused_on_a_cpu() -> None:
    with pytest.raises(StartFailed, match="set engine.pipeline_parallel_size to 1"):
        async with started(pipeline_parallel_size=2):
            pass


async def test_expert_parallelism_is_refused_on_a_cpu() -> None:
    """vLLM's kernels would read memory beyond the experts of a rank."""
    with pytest.raises(StartFailed, match="set engine.enable_expert_parallel to false"):
        async with started(enable_expert_parallel=True, tensor_parallel_size=2):
            pass


async def test_one_rank_uses_its_threads_and_its_death_is_detected() -> None:
    """One engine for three checks, since each needs a healthy one and the last kills it."""
    affinity = os.sched_getaffinity(0)
    async with started(cpu_threads=2) as engine:
        (info,) = await engine.llm.collective_rpc("coppice_info")
        assert info["num_threads"] == 2
        assert os.sched_getaffinity(0) == affinity
        (core,) = processes("EngineCore")

        core.send_signal(signal.SIGSTOP)
        await until(lambda: not engine.health().alive, seconds=STEP_SECONDS + SOON_SECONDS)
        assert "no heartbeat" in (engine.health().reason or "")
        core.send_signal(signal.SIGCONT)
        await until(lambda: engine.health().alive, seconds=SOON_SECONDS)
        assert len((await one_sample(engine, 5)).token_ids) == 5

        running = asyncio.create_task(one_sample(engine, 900))
        await asyncio.sleep(0.3)
        core.kill()
        async with asyncio.timeout(SOON_SECONDS):
            with pytest.raises(EngineDead):
                await running
        await until(lambda: engine.health().stage == "dead", seconds=SOON_SECONDS)
        with pytest.raises(EngineDead):
            await one_sample(engine, 5)


@pytest.mark.exhaustive
async def test_long_load_of_weights_does_not_count_as_death() -> None:
    assert LOAD_SECONDS > STEP_SECONDS + 1
    async with started(worker="tests.engine.slow_load.SlowWorker") as engine:
        await engine.pause("keep")
        change = asyncio.create_task(engine.update_weights(MODEL, "v1"))
        while not change.done():
            health = engine.health()
            assert health.alive, health.reason
            await asyncio.sleep(0.1)
        await change
        await engine.resume()
        assert (await one_sample(engine, 5)).versions[0].version == "v1"


@pytest.mark.exhaustive
async def test_two_ranks_answer_and_a_stopped_idle_worker_is_detected() -> None:
    async with started(tensor_parallel_size=2, cpu_threads=1) as engine:
        infos = await engine.llm.collective_rpc("coppice_info")
        assert [info["num_threads"] for info in infos] == [1, 1]
        takes_all = len(os.sched_getaffinity(0)) == 2
        assert (infos[0]["affinity"] != infos[1]["affinity"]) == takes_all
        assert len((await one_sample(engine, 5)).token_ids) == 5
        worker = processes("Worker")[-1]
        worker.send_signal(signal.SIGSTOP)
        await until(lambda: not engine.health().alive, seconds=STEP_SECONDS + SOON_SECONDS)
        worker.send_signal(signal.SIGCONT)
        await until(lambda: engine.health().alive, seconds=SOON_SECONDS)
        assert len((await one_sample(engine, 5)).token_ids) == 5


def alone(max_tokens: int, num_engines: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.engine.engine_process", str(max_tokens), str(num_engines)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def read_line_of(output: IO[str] | None) -> dict[str, Any]:
    assert output is not None
    for line in output:
        if line.startswith("{"):
            info: dict[str, Any] = json.loads(line)
            return info
    raise AssertionError("the process ended without a word")


def segments(held: Collection[leftover_files.FileId]) -> list[str]:
    """Those of them that have a name in shared memory."""
    return [file.name for file in leftover_files.SHM_DIR.iterdir() if _identity(file) in held]


def _identity(file: Path) -> leftover_files.FileId | None:
    try:
        return leftover_files.file_id(file.stat())
    except FileNotFoundError:  # of another test that has ended
        return None


def are_gone(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.exhaustive
async def test_ctrl_c_finishes_running_samples_and_leaves_nothing() -> None:
    with alone(max_tokens=900, num_engines=1) as process:
        children = read_line_of(process.stdout)["children"]
        os.killpg(process.pid, signal.SIGINT)
        last = read_line_of(process.stdout)
        assert (last["num_tokens"], last["finish"]) == (900, "length")
        assert process.wait(60) == 0
    await until(lambda: are_gone(children), seconds=SOON_SECONDS)


@pytest.mark.parametrize("num_engines", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
async def test_killed_service_takes_its_engines_along(num_engines: int) -> None:
    with alone(max_tokens=900, num_engines=num_engines) as process:
        children = read_line_of(process.stdout)["children"]
        held = {
            file for pid in [process.pid, *children] for file in leftover_files.files_used_by(pid)
        }
        assert segments(held)
        process.kill()
    await until(lambda: are_gone(children), seconds=SOON_SECONDS)
    await asyncio.sleep(leftover_files.MIN_AGE_SECONDS)
    leftover_files.remove_leftover_shared_memory()
    assert segments(held) == []
