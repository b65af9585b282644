"""Engines whose EngineCore runs in a process that was started before."""

import os

import psutil
import pytest

from engine.errors import StartFailed
from engine.launch.preloaded_core import PreloadedCore, preload_core
from engine.settings import EngineSettings
from engine.types import SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from service.cli import load_engine
from service.config.settings import Settings
from tests.engine.seedling import settings

pytestmark = pytest.mark.engine

THREADS = len(os.sched_getaffinity(0))


def preloaded(chosen: EngineSettings) -> PreloadedCore:
    core = preload_core(chosen)
    assert core is not None, "these tests run vLLM's build for CPUs"
    return core


async def test_engine_core_runs_in_the_preloaded_process_with_its_threads() -> None:
    chosen = settings(cpu_threads=THREADS)
    core = preloaded(chosen)
    engine = VllmEngine(chosen, preloaded=core)
    try:
        await engine.start("v0")
        (info,) = await engine.llm.collective_rpc("coppice_info")
        assert (info["pid"], info["num_threads"]) == (core.pid, THREADS)
        request = SampleRequest(
            id="one", prompt_token_ids=[1, 2, 3], sampling=Sampling(max_tokens=4, ignore_eos=True)
        )
        (pending,) = await engine.submit([request])
        assert len((await pending).token_ids) == 4
    finally:
        await engine.stop()
    assert not psutil.pid_exists(core.pid)


async def test_engine_that_does_not_start_ends_the_preloaded_process() -> None:
    chosen = settings(max_context_tokens=100_000)
    core = preloaded(chosen)
    engine = VllmEngine(chosen, preloaded=core)
    with pytest.raises(StartFailed):
        await engine.start("v0")
    await engine.stop()
    assert not psutil.pid_exists(core.pid)


def test_settings_that_are_refused_at_once_leave_no_process() -> None:
    before = set(psutil.Process().children())
    refused = EngineSettings(vllm_args={"there_is_no_such_argument": 1})
    with pytest.raises(StartFailed, match="there_is_no_such_argument"):
        load_engine(Settings(engine=refused))
    left = set(psutil.Process().children()) - before
    assert not [process for process in left if "core_preload" in " ".join(process.cmdline())]
