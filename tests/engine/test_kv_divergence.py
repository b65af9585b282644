"""Measured divergence of kept KV on the real engine, compared with float32 reference models."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from bench.harness.kv_teacher_forcing import Teacher, Turn
from engine.kv_versions.contexts import PROBE_TOKENS, ProbeChoice
from engine.kv_versions.measurement import ProbeRequests
from engine.kv_versions.probes import TOP_K, ProbeEngine, mean_divergences, measure
from engine.types import Completion, KeptKv, SampleRequest, Sampling, TopLogprobRows
from engine.vllm_engine import VllmEngine
from tests.engine.disturbed_models import make_disturbed_models, update
from tests.engine.seedling import BLOCK, settings

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

NUM_CHAINS = 3
LENGTH = 3 * BLOCK + 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_disturbed_models(tmp_path_factory.mktemp("models"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(settings(kv_probe_tokens=1000))
    await engine.start("v0")
    yield engine
    await engine.stop()


def tokens_of(number: int) -> list[int]:
    return [4 + (number * 31 + 7 * i + i * i) % 250 for i in range(LENGTH)]


async def ask(
    engine: VllmEngine,
    chain: int,
    *,
    max_kl: float | None = 1e9,
    max_tokens: int = 1,
    owner: str = "",
    session_id: str | None = None,
) -> Completion:
    request = SampleRequest(
        id=f"{chain}/{next(_NUMBERS)}",
        prompt_token_ids=tokens_of(chain),
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
        kept_kv=KeptKv(chain=f"chain {chain}", owner=owner, max_kl=max_kl),
        session_id=session_id,
        seed=chain,
    )
    [pending] = await engine.submit([request])
    return await pending


_NUMBERS = iter(range(10**9))


class Recorder:
    """Requests of probes, with the completions of their samples."""

    def __init__(self, upstream: ProbeEngine) -> None:
        self._upstream = upstream
        self.found: list[tuple[SampleRequest, Completion]] = []

    async def sample(self, request: SampleRequest) -> Completion:
        completion = await self._upstream.sample(request)
        self.found.append((request, completion))
        return completion

    async def score(
        self, token_ids: Sequence[int], given: NDArray[np.int32], priority: int
    ) -> TopLogprobRows:
        return await self._upstream.score(token_ids, given, priority)


async def serve_chains(engine: VllmEngine, models: dict[str, Path]) -> None:
    """Serve v0 with an empty cache, and one request of each chain."""
    await update(engine, models, "v0", keep_kv=False)
    for chain in range(NUM_CHAINS):
        await ask(engine, chain)


async def test_measured_divergence_is_that_of_reference_models(
    engine: VllmEngine, models: dict[str, Path]
) -> None:
    await serve_chains(engine, models)
    await update(engine, models, "v3")
    recorder = Recorder(ProbeRequests(engine._generation, engine.info.max_context_tokens))
    choice = ProbeChoice(engine._kv_measurement.contexts)
    [found] = mean_divergences(await measure(recorder, choice, TOP_K, 10**9))
    assert (found.lag, found.num_chains) == (1, NUM_CHAINS)
    assert NUM_CHAINS <= found.num_tokens <= NUM_CHAINS * PROBE_TOKENS
    teacher = Teacher({version: models[version] for version in ("v0", "v3")})
    expected = [
        kl
        for request, completion in recorder.found
        for kl in teacher.force(
            Turn(
                version="v3",
                token_ids=[*request.prompt_token_ids, *completion.token_ids],
                logprobs=completion.logprobs,
                kv_versions=completion.kv_versions,
            )
        ).kl
    ]
    assert len(expected) == found.num_tokens
    full = sum(expected) / len(expected)
    assert full > 1e-4
    assert 0.8 * full <= found.kl <= full + 1e-4  # the most probable tokens have less of it


async def test_chains_read_kv_up_to_the_measured_limit(
    engine: VllmEngine, models: dict[str, Path]
) -> None:
    await serve_chains(engine, models)
    await update(engine, models, "v2")
    assert (await ask(engine, 0)).num_cached_tokens == 0  # not measured yet
    await engine.measure_kept_kv(priority=10**9)
    [found] = engine.kept_kv().divergences
    assert found.num_chains == NUM_CHAINS - 1  # the KV of the other one is exact now
    refused = await ask(engine, 1, max_kl=found.kl / 2)
    accepted = await ask(engine, 2, max_kl=found.kl * 2)
    assert (refused.num_cached_tokens, refused.kv_lag) == (0, 0)
    assert (accepted.num_cached_tokens, accepted.kv_lag) == (3 * BLOCK, 1)


async def test_measured_divergence_holds_for_the_chains_of_its_owner(
    engine: VllmEngine, models: dict[str, Path]
) -> None:
    await update(engine, models, "v0", keep_kv=False)
    await ask(engine, 0, owner="a")
    await ask(engine, 1, owner="a")
    await ask(engine, 2, max_kl=None)
    await update(engine, models, "v2")
    await engine.measure_kept_kv(priority=10**9)
    assert (await ask(engine, 2, owner="b")).num_cached_tokens == 0
    assert (await ask(engine, 1, owner="a")).num_cached_tokens == 3 * BLOCK


async def test_kv_of_ended_sessions_is_not_measured(
    engine: VllmEngine, models: dict[str, Path]
) -> None:
    await update(engine, models, "v0", keep_kv=False)
    await ask(engine, 0, session_id="ended")
    await engine.release_session_kv(["ended"])
    await update(engine, models, "v1")
    await engine.measure_kept_kv(priority=10**9)
    assert engine.kept_kv().divergences == ()


async def test_measurement_ends_with_the_next_update(
    engine: VllmEngine, models: dict[str, Path]
) -> None:
    await update(engine, models, "v0", keep_kv=False)
    await ask(engine, 0)
    await update(engine, models, "v1")
    measuring = asyncio.create_task(engine.measure_kept_kv(priority=10**9))
    await asyncio.sleep(0)
    await update(engine, models, "v2")
    await measuring
    assert engine.kept_kv().divergences == ()
    await engine.measure_kept_kv(priority=10**9)
    assert [each.lag for each in engine.kept_kv().divergences] == [2]


async def test_other_callers_find_no_kv_of_a_measurement(
    engine: VllmEngine, models: dict[str, Path]
) -> None:
    await update(engine, models, "v0", keep_kv=False)
    await ask(engine, 0)
    await update(engine, models, "v1")
    [before] = await engine._processes.call_cores("coppice_check_pool")
    await engine.measure_kept_kv(priority=10**9)
    [after] = await engine._processes.call_cores("coppice_check_pool")
    assert after["num_hashes"] - before["num_hashes"] <= 1, "only the chain's own KV is cached"
    assert engine.kept_kv().divergences
    request = SampleRequest(
        id=str(next(_NUMBERS)), prompt_token_ids=tokens_of(0), sampling=Sampling(max_tokens=1)
    )
    [pending] = await engine.submit([request])
    assert (await pending).num_cached_tokens == 0


async def test_cancelled_measurement_leaves_no_request(
    engine: VllmEngine, models: dict[str, Path]
) -> None:
    await update(engine, models, "v0", keep_kv=False)
    await ask(engine, 0)
    await update(engine, models, "v1")
    await engine.pause("keep")
    measuring = asyncio.create_task(engine.measure_kept_kv(priority=10**9))
    await asyncio.sleep(0.2)
    measuring.cancel()
    await asyncio.gather(measuring, return_exceptions=True)
    await engine.resume()
    assert not engine.llm.output_processor.request_states
    assert engine.kept_kv().divergences == ()
