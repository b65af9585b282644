"""Ranks on two machines, with the executor mp: the same samples as on one, bounded failures."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import EngineDead, LoadFailed, StartFailed
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from engine.types.feature_stats import SpeculationStats
from engine.types.samples import KV_CACHE, WEIGHTS, Completion, SampleRequest, Sampling, TokenDelta
from engine.vllm_engine import VllmEngine
from tests.engine.adapters.peft_adapters import saved, under
from tests.engine.greedy import assert_greedy
from tests.engine.machines.second_machine import (
    LOOPBACK,
    Node,
    SecondMachine,
    namespace_or_skip,
    node,
)
from tests.engine.seedling import MODEL, reference, settings, teacher_forced
from tests.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.filterwarnings("ignore")]

PROMPT = [5 + i * 7 % 200 for i in range(100)]
END_SECONDS = 60.0
START_SECONDS = 120.0
DETECTION: dict[str, Any] = {"step_seconds": 3.0}
_IDS = itertools.count()


def engine_settings(machine: SecondMachine, **changes: Any) -> EngineSettings:
    two: dict[str, Any] = {
        "nnodes": 2,
        "tensor_parallel_size": 2,
        "master_addr": machine.master_addr,
        "master_port": free_port(),
    }
    return settings(**(two | changes))


@asynccontextmanager
async def started(
    machine: SecondMachine,
    folder: Path,
    *,
    speculation: SpeculationSettings | None = None,
    **changes: Any,
) -> AsyncIterator[tuple[VllmEngine, Node]]:
    chosen = engine_settings(machine, **changes)
    with node(machine, chosen, folder, speculation) as second:
        engine = VllmEngine(chosen, speculation=speculation)
        try:
            await engine.start("v0")
            yield engine, second
        finally:
            await engine.stop()


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    """Directory that the second machine does not see, with a changed model and an adapter."""
    changed = tmp_path / "hidden" / "v1"
    shutil.copytree(MODEL, changed)
    draw = torch.Generator().manual_seed(11)
    disturbed = {
        name: values + 0.2 * values.std() * torch.randn(values.shape, generator=draw)
        for name, values in load_file(MODEL / "model.safetensors").items()
    }
    save_file(disturbed, changed / "model.safetensors", metadata={"format": "pt"})
    saved(changed.parent / "adapter", seed=1)
    return changed.parent


@pytest.fixture
def machine(hidden: Path) -> Iterator[SecondMachine]:
    with namespace_or_skip(hidden) as second:
        yield second


def request(
    prompt: list[int], max_tokens: int = 24, *, adapter: str | None = None, **options: Any
) -> SampleRequest:
    sampling = Sampling(
        **({"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | options)
    )
    return SampleRequest(
        id=f"s{next(_IDS)}", prompt_token_ids=prompt, sampling=sampling, adapter=adapter
    )


async def samples(engine: VllmEngine, **options: Any) -> list[Completion]:
    requests = [request(PROMPT, **options) for _ in range(4)]
    return list(await asyncio.gather(*await engine.submit(requests)))


async def greedy_tokens(engine: VllmEngine, model: Any) -> list[int]:
    """Tokens of all samples: equal, and the greedy ones of the model."""
    tokens, *others = [list(sample.token_ids) for sample in await samples(engine)]
    assert others == [tokens] * len(others)
    assert_greedy(model, PROMPT, tokens)
    return tokens


async def assert_ranks_agree(engine: VllmEngine) -> None:
    """Unseeded samples have the log-probabilities that the engine computes for their tokens."""
    for sample in await samples(engine, temperature=1.0):
        scored = await engine.score(PROMPT, sample.token_ids)
        np.testing.assert_allclose(sample.logprobs, scored, atol=2e-3)


async def assert_samples_of_the_adapter(engine: VllmEngine, path: Path) -> None:
    await engine.load_adapter("a", path)
    (sample, *_) = await samples(engine, adapter="a")
    expected = teacher_forced(under(path), PROMPT, list(sample.token_ids))
    np.testing.assert_allclose(sample.logprobs, expected, atol=2e-3)
    await engine.unload_adapter("a")


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(END_SECONDS):
        while not condition():
            await asyncio.sleep(0.1)


async def load(engine: VllmEngine, path: Path, version: str) -> None:
    await engine.pause("keep")
    try:
        await engine.update_weights(path, version)
    finally:
        await engine.resume()


async def test_two_machines_sample_and_update_as_one(
    machine: SecondMachine, hidden: Path, tmp_path: Path
) -> None:
    """Groups, aborts, sleep, weights and an adapter; files that machine 1 does not see fail."""
    shared = Path(shutil.copytree(hidden, tmp_path / "shared"))
    v0, v1 = reference(), reference(shared / "v1")
    async with started(machine, tmp_path, seed=None, max_adapters=1) as (engine, second):
        before = await greedy_tokens(engine, v0)
        await assert_ranks_agree(engine)
        await assert_samples_of_the_adapter(engine, shared / "adapter")
        with pytest.raises(LoadFailed):
            await engine.load_adapter("hidden", hidden / "adapter")

        running = request(PROMPT, max_tokens=800)
        (pending,) = await engine.submit([running])
        await engine.abort([running.id])
        assert (await pending).finish == "abort"

        with pytest.raises(LoadFailed, match=r"ranks \[1\] do not see the files of v1"):
            await load(engine, hidden / "v1", "v1")
        assert await greedy_tokens(engine, v0) == before
        await load(engine, shared / "v1", "v1")
        assert (after := await greedy_tokens(engine, v1)) != before
        await engine.pause("abort", recompute=True)
        await engine.sleep(2, frozenset((WEIGHTS, KV_CACHE)))
        await engine.wake(frozenset((WEIGHTS, KV_CACHE)))
        await engine.resume()
        assert await greedy_tokens(engine, v1) == after
        await assert_ranks_agree(engine)

        await load(engine, MODEL, "v2")
        assert await greedy_tokens(engine, v0) == before

        await engine.stop()
        assert await asyncio.to_thread(second.process.wait, END_SECONDS) == 1
        await wait_for(lambda: not second.processes())
    assert "machine 0 has ended" in second.log.read_text()


async def test_killed_rank_of_machine_1_ends_the_engine(tmp_path: Path) -> None:
    """The rank is stopped at the first token, so that no sample ends before the kill."""
    async with started(LOOPBACK, tmp_path, **DETECTION) as (engine, second):
        (rank,) = second.ranks()
        running = asyncio.Event()

        def on_tokens(delta: TokenDelta) -> None:
            if not running.is_set():
                rank.suspend()
                running.set()

        asked = replace(request(PROMPT, max_tokens=900), on_tokens=on_tokens)
        (pending,) = await engine.submit([asked])
        ended = asyncio.ensure_future(pending)
        await running.wait()
        rank.kill()
        with pytest.raises(EngineDead):
            async with asyncio.timeout(END_SECONDS):
                await ended
        assert await asyncio.to_thread(second.process.wait, END_SECONDS) == 1
    assert "a rank of this machine has ended" in second.log.read_text()


async def test_killed_idle_machine_1_is_detected(tmp_path: Path) -> None:
    async with started(LOOPBACK, tmp_path, **DETECTION) as (engine, second):
        assert httpx.get(f"http://127.0.0.1:{second.port}/readyz").status_code == 200
        for rank in second.ranks():
            rank.kill()
        second.process.kill()
        await wait_for(lambda: engine.health().stage == "dead")
        with pytest.raises(EngineDead):
            await samples(engine)


async def test_machines_with_different_settings_are_refused(tmp_path: Path) -> None:
    chosen = engine_settings(LOOPBACK)
    other = chosen.model_copy(update={"max_logprobs": 7})
    with node(LOOPBACK, EngineSettings(**other.model_dump()), tmp_path):
        engine = VllmEngine(chosen)
        try:
            with pytest.raises(StartFailed, match=r"machines \[1\] were started with other"):
                await engine.start("v0")
        finally:
            await engine.stop()


async def test_machine_1_without_machine_0_ends(tmp_path: Path) -> None:
    with node(LOOPBACK, engine_settings(LOOPBACK, start_seconds=8.0), tmp_path) as second:
        assert await asyncio.to_thread(second.process.wait, START_SECONDS) == 1
        await wait_for(lambda: not second.processes())
    assert "the ranks did not start within 8 s" in second.log.read_text()


async def test_siblings_drafts_are_used_on_two_machines(tmp_path: Path) -> None:
    model = reference()
    speculation = SpeculationSettings(mode="siblings", allow_predicted_loss=True)
    async with started(LOOPBACK, tmp_path, speculation=speculation) as (engine, _):
        for _ in range(2):
            await greedy_tokens(engine, model)
        await wait_for(lambda: sum(engine.stats(SpeculationStats).accepted.values()) > 0)
