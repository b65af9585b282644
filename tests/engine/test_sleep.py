"""Sleep mode on the real engine: released memory, and the same samples after the wake."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from engine.errors import LoadFailed
from engine.launch.processes import engine_processes
from engine.types import KV_CACHE, WEIGHTS, Completion, SampleRequest, Sampling, SleepTag
from engine.vllm_engine import VllmEngine
from tests.engine.seedling import MODEL, settings

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
in_module = pytest.mark.asyncio(loop_scope="module")
ALL: frozenset[SleepTag] = frozenset((WEIGHTS, KV_CACHE))
PROMPT_TOKENS, NUM_PROMPTS = 900, 24
WEIGHT_BYTES = 2_000_000 * 4
_IDS = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model, whose files a test changes."""
    return Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("sleep") / "model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(settings(model))
    await engine.start("v0")
    yield engine
    await engine.stop()


def request(prompt: list[int], max_tokens: int = 8) -> SampleRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return SampleRequest(id=f"s{next(_IDS)}", prompt_token_ids=prompt, sampling=sampling)


async def samples(engine: VllmEngine, *prompts: list[int]) -> list[Completion]:
    return list(await asyncio.gather(*await engine.submit([request(p) for p in prompts])))


async def fill_cache(engine: VllmEngine) -> int:
    """Fill a part of the KV cache; returns its bytes."""
    prompts = [[5 + (i + j * j) % 200 for j in range(PROMPT_TOKENS)] for i in range(NUM_PROMPTS)]
    await samples(engine, *prompts)
    return NUM_PROMPTS * PROMPT_TOKENS * engine.info.kv_bytes_per_token


async def fall_asleep(engine: VllmEngine, level: Any, tags: frozenset[SleepTag] = ALL) -> None:
    await engine.pause("keep", recompute=True)
    await engine.sleep(level, tags)


def resident_bytes() -> int:
    return sum(int(psutil.Process(pid).memory_info().rss) for pid in engine_processes())


@in_module
@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_releases_memory_and_changes_no_sample(engine: VllmEngine, level: int) -> None:
    prompt = [5, 6, 7, 8] * 20
    (before,) = await samples(engine, prompt)
    kv_bytes = await fill_cache(engine)
    awake = resident_bytes()
    (running,) = await engine.submit([request(prompt)])
    await fall_asleep(engine, level)
    assert engine.health().stage == "sleeping" and engine.health().alive
    assert awake - resident_bytes() > 0.8 * kv_bytes
    await engine.wake(ALL)
    await engine.resume()
    assert engine.health().stage == "serving"
    after = [await running, *await samples(engine, prompt)]
    for completion in after:
        assert completion.token_ids == before.token_ids
        assert completion.logprobs == pytest.approx(before.logprobs, abs=1e-5)


@in_module
async def test_level_2_drops_the_weights_until_everything_is_awake(engine: VllmEngine) -> None:
    prompt = [9, 8, 7] * 20
    (before,) = await samples(engine, prompt)
    await fall_asleep(engine, 1)
    first = resident_bytes()
    await engine.wake(ALL)
    await engine.sleep(2, ALL)
    assert first - resident_bytes() > 0.5 * WEIGHT_BYTES
    await engine.wake(frozenset((WEIGHTS,)))
    assert engine.health().stage == "sleeping"
    await engine.wake(frozenset((KV_CACHE,)))
    await engine.resume()
    (after,) = await samples(engine, prompt)
    assert after.token_ids == before.token_ids


@in_module
async def test_weights_that_are_updated_while_the_cache_sleeps_are_served(
    engine: VllmEngine, model: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    await fall_asleep(engine, 2)
    await engine.wake(frozenset((WEIGHTS,)))
    await engine.update_weights(other, "v1")
    assert engine.health().stage == "sleeping"
    await engine.wake(ALL)
    await engine.resume()
    (after,) = await samples(engine, [5, 6, 7] * 20)
    assert [span.version for span in after.versions] == ["v1"]
    await engine.pause("keep")
    await engine.update_weights(model, "v0")
    await engine.resume()


@in_module
async def test_level_2_is_refused_if_the_served_files_have_changed(
    engine: VllmEngine, model: Path
) -> None:
    file = model / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content)
    await engine.pause("keep", recompute=True)
    with pytest.raises(LoadFailed, match="have changed since"):
        await engine.sleep(2, ALL)
    await engine.sleep(1, ALL)
    await engine.wake(ALL)
    await engine.resume()
    assert len(await samples(engine, [5, 6, 7])) == 1
