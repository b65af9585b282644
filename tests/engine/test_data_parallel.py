"""Two data-parallel engines in one service: placement, weights updates, and death of one."""

import asyncio
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from prometheus_client import REGISTRY
from safetensors.torch import load_file, save_file

from engine.errors import EngineDead, LoadFailed
from engine.types.samples import Completion, KeptKv, SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from tests.engine.adapters.peft_adapters import saved, under
from tests.engine.greedy import assert_greedy
from tests.engine.seedling import BLOCK, MODEL, reference, settings
from tests.engine.stepped_engine import FAULTY
from tests.engine.test_processes import SOON_SECONDS, processes, until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

LENGTH = 3 * BLOCK
STEP_SECONDS = 5.0
_COUNT = iter(range(10**9))


@asynccontextmanager
async def started(**changes: Any) -> AsyncIterator[VllmEngine]:
    chosen = settings(data_parallel_size=2, step_seconds=STEP_SECONDS, **changes)
    engine = VllmEngine(chosen, worker_extension=FAULTY)
    try:
        await engine.start("v0")
        yield engine
    finally:
        await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    async with started(max_adapters=1) as engine:
        yield engine


def prompt_of(first: int) -> list[int]:
    """Prompts with different first tokens share no block."""
    return [first + 10, *(10 + i % 60 for i in range(LENGTH - 1))]


def samples(prompt: Sequence[int], n: int, **options: Any) -> list[SampleRequest]:
    sampling = Sampling(**{"max_tokens": 8, "ignore_eos": True, **options.pop("sampling", {})})
    return [
        SampleRequest(id=f"dp{next(_COUNT)}", prompt_token_ids=prompt, sampling=sampling, **options)
        for _ in range(n)
    ]


async def run(engine: VllmEngine, requests: Sequence[SampleRequest]) -> list[Completion]:
    return list(await asyncio.gather(*await engine.submit(requests)))


def ranks(engine: VllmEngine) -> dict[str, int]:
    """Data-parallel rank of each running request, by vLLM's own record."""
    client: Any = engine.llm.engine_core
    states = engine.llm.output_processor.request_states
    return {
        states[request_id].external_req_id: client.core_engines.index(core)
        for request_id, core in client.reqs_in_flight.items()
        if request_id in states
    }


async def rank_of(engine: VllmEngine, **options: Any) -> int:
    """Rank of one sample, which is run to its end."""
    (request,) = samples(options.pop("prompt", prompt_of(0)), 1, **options)
    pending = await engine.submit([request])
    rank = ranks(engine)[request.id]
    await asyncio.gather(*pending)
    return rank


async def of_core(engine: VllmEngine, rank: int, method: str, *args: Any) -> Any:
    """Result of the worker of one engine."""
    client: Any = engine.llm.engine_core
    [result] = await client._call_utility_async(
        "collective_rpc", method, None, args, None, engine=client.core_engines[rank]
    )
    return result


async def test_engines_have_different_random_streams(engine: VllmEngine) -> None:
    """It runs first, because the random streams of both engines are then at their beginning."""
    hot = {"temperature": 2.0, "max_tokens": 16}
    requests = [samples([5, 7, 11], 1, sampling=hot)[0] for _ in range(2)]
    pending = [await engine.submit([request]) for request in requests]
    assert sorted(ranks(engine)[request.id] for request in requests) == [0, 1]
    found = [(await awaited).token_ids for [awaited] in pending]
    assert found[0] != found[1]


async def test_samples_of_a_group_share_the_kv_of_one_engine(engine: VllmEngine) -> None:
    groups = [samples(prompt_of(i), 3, group=f"g{i}") for i in range(4)]
    pending = [await engine.submit(group) for group in groups]
    placed = ranks(engine)
    of_groups = [{placed[sample.id] for sample in group} for group in groups]
    assert all(len(used) == 1 for used in of_groups)
    assert Counter(rank for used in of_groups for rank in used) == {0: 2, 1: 2}
    for completions in [await asyncio.gather(*group) for group in pending]:
        cached = sorted(found.num_cached_tokens for found in completions)
        assert cached[1:] == [LENGTH - BLOCK, LENGTH - BLOCK]


async def test_sessions_and_chains_return_to_their_engine(engine: VllmEngine) -> None:
    chain = KeptKv(chain="c", max_lag=None)
    for options in ({"session_id": "s"}, {"kept_kv": chain}, {"group": "again"}):
        first = await rank_of(engine, **options)
        long: dict[str, Any] = {"sampling": {"max_tokens": 400}}
        busy = samples(prompt_of(7), 2, **long)
        others = [await engine.submit([sample]) for sample in busy]
        assert sorted(ranks(engine)[sample.id] for sample in busy) == [0, 1]
        assert {await rank_of(engine, **options) for _ in range(3)} == {first}
        await engine.abort([sample.id for sample in busy])
        await asyncio.gather(*(awaited for pending in others for awaited in pending))


async def test_greedy_responses_and_scores_are_those_of_the_model(engine: VllmEngine) -> None:
    model = reference()
    prompts = [prompt_of(i) for i in range(4)]
    greedy = {"temperature": 0.0, "max_tokens": 16}
    requests = [samples(prompt, 1, sampling=greedy)[0] for prompt in prompts]
    for prompt, found in zip(prompts, await run(engine, requests), strict=True):
        assert_greedy(model, prompt, found.token_ids)
    scores = await asyncio.gather(*(engine.score([5, 6], [7, 8, 9]) for _ in range(4)))
    np.testing.assert_allclose(scores, [scores[0]] * 4, atol=1e-5)


async def test_scores_are_spread_over_the_engines(engine: VllmEngine) -> None:
    tasks = [asyncio.create_task(engine.score(prompt_of(i), [5] * 400)) for i in range(4)]
    while len(ranks(engine)) < 4:
        await asyncio.sleep(0)
    assert Counter(ranks(engine).values()) == {0: 2, 1: 2}
    await asyncio.gather(*tasks)


async def test_abort_ends_samples_of_both_engines(engine: VllmEngine) -> None:
    endless: dict[str, Any] = {"sampling": {"max_tokens": 900}}
    requests = [samples(prompt_of(i), 1, **endless)[0] for i in range(2)]
    pending = [await engine.submit([request]) for request in requests]
    assert sorted(ranks(engine)[request.id] for request in requests) == [0, 1]
    await engine.abort([request.id for request in requests])
    ended = await asyncio.gather(*(awaited for group in pending for awaited in group))
    assert [found.finish for found in ended] == ["abort", "abort"]
    await until_idle(engine)


async def until_idle(engine: VllmEngine) -> None:
    async with asyncio.timeout(SOON_SECONDS):
        while any(
            state["num_requests"] or state["num_references"]
            for state in await engine.llm.engine_core.call_utility_all_async("coppice_check_pool")
        ):
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with other weights."""
    model = tmp_path_factory.mktemp("weights") / "model"
    shutil.copytree(MODEL, model)
    for file in model.glob("*.safetensors"):
        tensors = load_file(file)
        torch.manual_seed(0)
        save_file(
            {name: value + 0.02 * torch.randn_like(value) for name, value in tensors.items()},
            file,
            {"format": "pt"},
        )
    return model


async def greedy_text(engine: VllmEngine) -> list[tuple[str, ...]]:
    """Greedy responses of two samples, one per engine, with their weights versions."""
    options: dict[str, Any] = {"sampling": {"temperature": 0.0, "max_tokens": 40}}
    requests = [samples(prompt_of(3), 1, **options)[0] for _ in range(2)]
    pending = [await engine.submit([request]) for request in requests]
    assert sorted(ranks(engine)[request.id] for request in requests) == [0, 1]
    found = await asyncio.gather(*(awaited for group in pending for awaited in group))
    return [(str(each.token_ids), *(span.version for span in each.versions)) for each in found]


@pytest.mark.parametrize("failing", [0, 1])
async def test_failed_load_of_one_engine_restores_the_other(
    engine: VllmEngine, changed: Path, failing: int
) -> None:
    before = await greedy_text(engine)
    await engine.pause("keep")
    await of_core(engine, failing, "coppice_fail_next", 3)
    with pytest.raises(LoadFailed):
        await engine.update_weights(changed, "v1")
    await engine.resume()
    assert engine.health().stage == "serving"
    assert await greedy_text(engine) == before


async def test_update_loads_on_both_engines(engine: VllmEngine, changed: Path) -> None:
    before = await greedy_text(engine)
    await engine.pause("keep")
    await engine.update_weights(changed, "v1")
    await engine.resume()
    after = await greedy_text(engine)
    assert after[0] == after[1] and after[0][1:] == ("v1",)
    assert after[0][0] != before[0][0]
    await engine.pause("keep")
    await engine.update_weights(MODEL, "v0")
    await engine.resume()
    assert await greedy_text(engine) == before


async def test_adapter_applies_on_both_engines(engine: VllmEngine, tmp_path: Path) -> None:
    await engine.load_adapter("a@1", saved(tmp_path / "a", seed=1))
    options: dict[str, Any] = {"sampling": {"temperature": 0.0}, "adapter": "a@1"}
    requests = [samples(prompt_of(9), 1, **options)[0] for _ in range(2)]
    pending = [await engine.submit([request]) for request in requests]
    assert sorted(ranks(engine)[request.id] for request in requests) == [0, 1]
    model = under(tmp_path / "a")
    for group in pending:
        assert_greedy(model, prompt_of(9), (await group[0]).token_ids)
    await engine.unload_adapter("a@1")


async def test_reset_applies_to_both_engines(engine: VllmEngine) -> None:
    for key in ("r1", "r2"):
        await run(engine, samples(prompt_of(20), 1, group=key))
    await engine.pause("keep")
    await engine.reset_prefix_cache()
    pools = await engine.llm.engine_core.call_utility_all_async("coppice_check_pool")
    assert [pool["num_hashes"] for pool in pools] == [0, 0]
    await engine.resume()


async def test_sleep_and_wake_apply_to_both_engines(engine: VllmEngine) -> None:
    before = await greedy_text(engine)
    await engine.pause("wait", recompute=True)
    await engine.sleep(2, {"weights", "kv_cache"})
    await engine.wake({"weights", "kv_cache"})
    await engine.resume()
    assert await greedy_text(engine) == before


async def test_state_names_both_engines(engine: VllmEngine) -> None:
    info = engine.info
    assert info.data_parallel_size == 2
    pools = await engine.llm.engine_core.call_utility_all_async("coppice_check_pool")
    assert info.num_blocks == sum(pool["num_blocks"] + 1 for pool in pools)
    assert len({worker["pid"] for worker in await _workers(engine)}) == 2


async def _workers(engine: VllmEngine) -> list[dict[str, Any]]:
    return [await of_core(engine, rank, "coppice_info") for rank in range(2)]


async def test_metrics_of_vllm_have_a_label_per_engine(engine: VllmEngine) -> None:
    before = generated_tokens()
    await greedy_text(engine)
    after = generated_tokens()
    assert {name: after[name] - before[name] for name in after} == {"0": 40, "1": 40}


def generated_tokens() -> dict[str, float]:
    return {
        sample.labels["engine"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "vllm:generation_tokens_total"
    }


@pytest.mark.parametrize("name", ["EngineCore_DP1", "DPCoordinator"])
async def test_stopped_process_is_detected(engine: VllmEngine, name: str) -> None:
    (stopped,) = processes(name)
    stopped.send_signal(signal.SIGSTOP)
    await until(lambda: not engine.health().alive, seconds=STEP_SECONDS + SOON_SECONDS)
    stopped.send_signal(signal.SIGCONT)
    await until(lambda: engine.health().alive, seconds=SOON_SECONDS)
    assert len(await greedy_text(engine)) == 2


async def check_death(engine: VllmEngine, rank: int) -> None:
    """Kill one engine, after which no sample continues and no process of the service is left."""
    endless: dict[str, Any] = {"sampling": {"max_tokens": 900}}
    requests = [samples(prompt_of(i), 1, **endless)[0] for i in range(2)]
    pending = [await engine.submit([request]) for request in requests]
    assert sorted(ranks(engine)[request.id] for request in requests) == [0, 1]
    psutil.Process((await of_core(engine, rank, "coppice_info"))["pid"]).kill()
    async with asyncio.timeout(SOON_SECONDS):
        for [awaited] in pending:
            with pytest.raises(EngineDead):
                await awaited
    await until(lambda: engine.health().stage == "dead", seconds=SOON_SECONDS)
    assert not engine.health().alive
    await engine.stop()
    await until(lambda: not processes("VLLM"), seconds=SOON_SECONDS)


async def test_death_of_one_engine_ends_all_samples_and_the_service(engine: VllmEngine) -> None:
    """It runs last, because the engines of the other tests are dead afterwards."""
    await check_death(engine, 1)


@pytest.mark.exhaustive
async def test_death_of_the_first_engine_ends_all_samples_and_the_service() -> None:
    async with started() as engine:
        await check_death(engine, 0)
