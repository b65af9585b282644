"""P7: when the engine dies or hangs, the probes report it and every waiting call fails.

This includes calls that vLLM itself would leave waiting forever.
"""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

import pytest

from engine.errors import EngineDead
from engine.vllm_engine import VllmEngine
from tests.engine.seedling import MODEL
from tests.engine.test_processes import SOON_SECONDS, one_sample, processes, started, until

pytestmark = pytest.mark.engine


async def dies(waiting: "asyncio.Task[Any]") -> None:
    async with asyncio.timeout(SOON_SECONDS):
        with pytest.raises(EngineDead):
            await waiting


def start_call(call: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    return asyncio.create_task(call)


async def refuses_everything(engine: VllmEngine) -> None:
    for call in (engine.pause("keep"), engine.resume(), engine.score([1], [2])):
        await dies(start_call(call))
    await engine.abort(["unknown"])


async def test_engine_death_during_an_activation_fails_it_at_once() -> None:
    async with started(worker="tests.engine.slow_load.SlowWorker") as engine:
        await engine.pause("keep")
        frozen = start_call(one_sample(engine, 5))
        change = start_call(engine.update_weights(MODEL, "v1"))
        await asyncio.sleep(1)
        (core,) = processes("EngineCore")
        core.kill()
        await dies(change)
        await dies(frozen)
        await until(lambda: engine.health().stage == "dead", seconds=SOON_SECONDS)
        await refuses_everything(engine)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("EngineCore", {}),
        pytest.param("Worker", {"tensor_parallel_size": 2}, marks=pytest.mark.exhaustive),
    ],
)
async def test_persistent_hang_is_treated_as_death(name: str, ranks: dict[str, Any]) -> None:
    async with started(cpu_threads=1, **ranks) as engine:
        running = start_call(one_sample(engine, 900))
        await asyncio.sleep(0.3)
        processes(name)[-1].send_signal(signal.SIGSTOP)
        resuming = start_call(engine.pause("keep"))
        await until(lambda: not engine.health().alive, seconds=SOON_SECONDS)
        await dies(running)
        await dies(resuming)
        assert "hung" in (engine.health().reason or "")
        await until(lambda: not processes("VLLM"), seconds=SOON_SECONDS)
