"""Kept KV that is computed again between requests, on the real engine, against exact KV."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.harness.kv_teacher_forcing import Teacher, Turn
from engine.types import Completion, KeptKv, KvVersionSpan, SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from tests.engine.disturbed_models import make_disturbed_models, update
from tests.engine.seedling import BLOCK, settings

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PRIORITY = 10**9
LENGTH = 16 * BLOCK + 3
NUM_TOKENS = 8
CLOSE = 1e-3
_numbers = count()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_disturbed_models(tmp_path_factory.mktemp("models"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine() -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(settings(kv_refresh_tokens_per_step=2 * BLOCK))
    await engine.start("v0")
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared_engine: VllmEngine, models: dict[str, Path]) -> VllmEngine:
    """Serves v0, with an empty prefix cache."""
    await update(shared_engine, models, "v0", keep_kv=False)
    return shared_engine


async def ask(
    engine: VllmEngine,
    prompt: Sequence[int],
    chain: str | None,
    session_id: str | None = None,
    **limits: Any,
) -> Completion:
    request = SampleRequest(
        id=str(next(_numbers)),
        prompt_token_ids=prompt,
        sampling=Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0),
        kept_kv=None if chain is None else KeptKv(chain=chain, **limits),
        session_id=session_id,
    )
    [pending] = await engine.submit([request])
    return await pending


def tokens_of(number: int) -> list[int]:
    return [4 + (number * 31 + 7 * i + i * i) % 250 for i in range(LENGTH)]


async def turn(engine: VllmEngine, number: int, **limits: Any) -> list[int]:
    """Context of a chain after its first request."""
    prompt = tokens_of(number)
    return prompt + (await ask(engine, prompt, f"chain {number}", **limits)).token_ids


async def refresh(engine: VllmEngine) -> int:
    """Number of tokens that are computed until nothing is beyond its limit."""
    before = engine.kept_kv().num_refreshed_tokens
    while await engine.refresh_kept_kv(PRIORITY):
        pass
    return engine.kept_kv().num_refreshed_tokens - before


def versions(answer: Completion) -> list[str]:
    return [span.version for span in answer.kv_versions]


async def assert_nothing_is_held(engine: VllmEngine) -> None:
    assert not engine.llm.output_processor.request_states
    [pool] = await engine._processes.call_cores("coppice_check_pool")
    assert (pool["num_references"], pool["num_requests"], pool["num_tables"]) == (0, 0, 0)
    assert pool["num_free_blocks"] == pool["num_blocks"]


async def test_request_after_a_recomputation_finds_exact_kv(
    engine: VllmEngine, models: dict[str, Path]
) -> None:
    contexts = [await turn(engine, number, max_lag=0) for number in range(3)]
    await turn(engine, 3)  # has no limit
    await turn(engine, 4, max_lag=1)  # is within its limit
    await update(engine, models, "v1")
    num_refreshed = await refresh(engine)
    num_tokens = sum(map(len, contexts))
    assert num_tokens <= num_refreshed <= num_tokens + 3 * len(contexts[0]) // BLOCK
    for number, context in enumerate(contexts):
        prompt = [*context, 9]
        answer = await ask(engine, prompt, f"chain {number}", max_lag=0)
        exact = await ask(engine, prompt, None)
        end = len(prompt) + NUM_TOKENS - 1
        assert answer.num_cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
        assert answer.kv_versions == (KvVersionSpan(version="v1", start=0, end=end),)
        assert answer.logprobs == pytest.approx(exact.logprobs, abs=1e-4)
    await assert_nothing_is_held(engine)


async def test_recomputation_across_updates_has_the_labels_of_its_kv(
    engine: VllmEngine, models: dict[str, Path]
) -> None:
    """Recomputation, interrupted by an update, that continues behind the part within the limit."""
    context = await turn(engine, 0, max_lag=1)
    await update(engine, models, "v1")
    assert await refresh(engine) == 0
    await update(engine, models, "v2")
    running = asyncio.create_task(engine.refresh_kept_kv(PRIORITY))
    before = engine.kept_kv().num_refreshed_tokens
    while engine.kept_kv().num_refreshed_tokens == before:
        await asyncio.sleep(0)
    await update(engine, models, "v3")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert await refresh(engine) > 0
    prompt = [*context, 9]
    answer = await ask(engine, prompt, "chain 0", max_lag=1)
    assert answer.num_cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
    assert versions(answer) == ["v2", "v3"]
    stated = Turn(
        version="v3",
        token_ids=prompt + answer.token_ids,
        logprobs=answer.logprobs,
        kv_versions=answer.kv_versions,
    )
    forced = Teacher({version: models[version] for version in ("v2", "v3")}).force(stated)
    assert max(map(abs, forced.log_ratio_stated)) <= CLOSE
    assert max(map(abs, forced.log_ratio_exact)) > CLOSE, "the versions are different"


async def test_kv_beyond_the_measured_divergence_is_computed_again(
    engine: VllmEngine, models: dict[str, Path]
) -> None:
    strict = await turn(engine, 0, max_kl=1e-9)
    loose = await turn(engine, 1, max_kl=1e9)
    await update(engine, models, "v2")
    await engine.measure_kept_kv(PRIORITY)
    assert engine.kept_kv().divergences
    num_refreshed = await refresh(engine)
    assert len(strict) <= num_refreshed < 2 * len(strict)
    assert versions(await ask(engine, [*strict, 9], "chain 0", max_kl=1e-9)) == ["v2"]
    assert versions(await ask(engine, [*loose, 9], "chain 1", max_kl=1e9)) == ["v0", "v2"]


async def test_next_request_computes_what_is_left_of_a_recomputation(
    engine: VllmEngine, models: dict[str, Path]
) -> None:
    context = await turn(engine, 0, max_lag=0)
    await update(engine, models, "v1")
    running = asyncio.create_task(engine.refresh_kept_kv(PRIORITY))
    before = engine.kept_kv().num_refreshed_tokens
    while engine.kept_kv().num_refreshed_tokens == before:
        await asyncio.sleep(0)
    prompt = [*context, 9]
    answer = await ask(engine, prompt, "chain 0", max_lag=0)
    await running
    assert engine.kept_kv().num_refreshed_tokens - before < len(context)
    assert 0 < answer.num_cached_tokens < LENGTH
    assert versions(answer) == ["v1"]
    assert await refresh(engine) == 0
    exact = await ask(engine, prompt, None)
    assert answer.logprobs == pytest.approx(exact.logprobs, abs=1e-4)


@pytest.mark.parametrize("ending", ["cancelled", "released", "reset"])
async def test_ended_recomputation_holds_nothing(
    engine: VllmEngine, models: dict[str, Path], ending: str
) -> None:
    await turn(engine, 0, session_id="s", max_lag=0)
    await update(engine, models, "v1")
    await engine.pause("keep")
    running = asyncio.create_task(engine.refresh_kept_kv(PRIORITY))
    await asyncio.sleep(0.2)
    if ending == "cancelled":
        running.cancel()
    elif ending == "released":
        await engine.release_session_kv(["s"])
    else:
        await engine.reset_prefix_cache()
    await engine.resume()
    await asyncio.gather(running, return_exceptions=True)
    if ending == "cancelled":
        await engine.release_session_kv(["s"])
    assert not await engine.refresh_kept_kv(PRIORITY)
    await assert_nothing_is_held(engine)
