"""The engine's random stream across starts and replicas."""

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coppice import AsyncRollouts
from engine.settings import EngineSettings
from engine.types.samples import SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from service.cluster.in_memory_registry import InMemoryRegistry
from tests.cluster import fleet
from tests.engine.made_arguments import engine_arguments
from tests.engine.seedling import MODEL, settings

PROMPT = [5, 7, 11, 13]
NUM_SAMPLES = 7
MAX_TOKENS = 16
TEMPERATURE = 2.0  # so that two samples are not equal by chance
SAMPLING = Sampling(temperature=TEMPERATURE, max_tokens=MAX_TOKENS, ignore_eos=True)


def argument(**changes: int) -> int:
    return int(engine_arguments(EngineSettings(**changes), MODEL, on_cpu=True).seed)


def test_seed_is_random_for_each_start() -> None:
    seeds = [argument() for _ in range(8)]
    assert len(set(seeds)) == 8
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_configured_seed_is_used() -> None:
    assert [argument(seed=0), argument(seed=2**32 - 1)] == [0, 2**32 - 1]


@asynccontextmanager
async def started(seed: int | None) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(settings(seed=seed))
    try:
        await engine.start("v0")
        yield engine
    finally:
        await engine.stop()


async def samples(engine: VllmEngine, seed: int | None) -> list[list[int]]:
    """Responses sampled one at a time: batching affects which random numbers a request gets."""
    drawn = []
    for index in range(NUM_SAMPLES):
        request = SampleRequest(
            id=f"{seed}-{index}",
            prompt_token_ids=PROMPT,
            sampling=SAMPLING,
            seed=None if seed is None else seed + index,
        )
        (pending,) = await engine.submit([request])
        drawn.append(list((await pending).token_ids))
    return drawn


@pytest.mark.engine
@pytest.mark.exhaustive
async def test_starts_share_samples_only_with_the_same_seed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="engine"):
        async with started(None) as engine:
            first = await samples(engine, None), await samples(engine, 1)
    logged = re.search(r"engine\.seed is (\d+)", caplog.text)
    assert logged is not None
    async with started(int(logged[1])) as engine:
        assert (await samples(engine, None), await samples(engine, 1)) == first
    async with started(None) as engine:
        unseeded, seeded = await samples(engine, None), await samples(engine, 1)
    assert not set(map(tuple, unseeded)) & set(map(tuple, first[0]))
    assert seeded == first[1]


@pytest.mark.engine
@pytest.mark.exhaustive
async def test_replicas_draw_different_samples(tmp_path: Path) -> None:
    shared = InMemoryRegistry()
    small = settings(seed=None, max_context_tokens=128, max_sequences=8, cache_bytes=2**24)
    drawn = []
    async with fleet(tmp_path, [VllmEngine(small) for _ in range(2)], lambda: shared) as replicas:
        for served in replicas:
            async with AsyncRollouts(served.url, timeout=120) as rollouts:
                result = await rollouts.rollout(
                    [PROMPT],
                    n=NUM_SAMPLES,
                    temperature=TEMPERATURE,
                    max_tokens=MAX_TOKENS,
                    ignore_eos=True,
                )
            drawn.append({tuple(s.token_ids.tolist()) for s in result.groups[0].samples})
    assert all(len(tokens) == NUM_SAMPLES for tokens in drawn)
    assert not drawn[0] & drawn[1]
