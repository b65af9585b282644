"""Two real engines of one cluster draft from the samples of both."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coppice import AsyncRollouts
from engine.settings import EngineSettings, SpeculationSettings
from engine.vllm_engine import VllmEngine
from kernels.draft_index.file_format import StoreContents
from kernels.draft_index.store import is_built
from tests.cluster import fleet
from tests.engine.seedling import MODEL
from tests.redis_server import RedisServer, redis_server

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not is_built(), reason="the draft store was not built"),
]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


def replica(folder: Path, name: str) -> VllmEngine:
    settings = EngineSettings(
        model=str(MODEL),
        dtype="float32",
        max_context_tokens=128,
        max_sequences=8,
        cache_bytes=2**24,
        cpu_threads=1,
    )
    speculation = SpeculationSettings(
        mode="siblings",
        allow_predicted_loss=True,
        store_file=folder / f"{name}.drafts",
        cache_directory=folder / "cache",
    )
    return VllmEngine(settings, speculation=speculation)


async def test_two_replicas_draft_from_the_samples_of_both(
    redis: RedisServer, tmp_path: Path
) -> None:
    """The draft stores are saved at the stop. Each has the samples of both replicas."""
    engines = [replica(tmp_path, name) for name in ("one", "other")]
    sections: dict[str, dict[str, Any]] = {
        "cluster": {"redis_url": redis.url, "call_seconds": 5.0, "expire_seconds": 30.0},
        "draft_history": {"enabled": True, "interval_seconds": 0.05},
        "weights": {"catch_up_seconds": 0.1},
    }
    sampled: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    async with fleet(tmp_path, engines, lambda: None, **sections) as replicas:
        labels = {engine.info.draft_store_label for engine in engines}
        assert len(labels) == 1 and None not in labels
        for number, served in enumerate(replicas):
            prompt = (5, 6, 7, number)
            async with AsyncRollouts(served.url, timeout=120) as rollouts:
                result = await rollouts.rollout([list(prompt)], n=4, max_tokens=24)
            samples = result.groups[0].samples
            sampled[prompt] = {tuple(sample.token_ids.tolist()) for sample in samples}
        for served in replicas:
            await received(served, 4)
    for name in ("one", "other"):
        contents = StoreContents.read(tmp_path / f"{name}.drafts")
        stored = {
            tuple(prompt.tolist()): {tuple(text.tokens.tolist()) for text in found}
            for prompt, found in contents.prompts()
        }
        assert {prompt: stored[prompt] for prompt in sampled} == sampled


async def received(served: Any, number: int) -> None:
    direction = 'coppice_draft_history_samples_total{direction="received"}'
    async with asyncio.timeout(60):
        while f"{direction} {float(number)}" not in (await served.http.get("/metrics")).text:
            await asyncio.sleep(0.05)
