"""Sleep mode on the real engine: released memory, and the same samples after the wake."""

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from engine.errors import LoadFailed
from engine.launch.processes import engine_processes
from engine.types.kv import ExportStatus
from engine.types.samples import (
    KV_CACHE,
    WEIGHTS,
    Completion,
    KeptKv,
    SampleRequest,
    Sampling,
    SleepTag,
)
from engine.vllm_engine import VllmEngine
from tests.arena import TestArena
from tests.engine.seedling import BLOCK, MODEL, settings

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
in_module = pytest.mark.asyncio(loop_scope="module")
ALL: frozenset[SleepTag] = frozenset((WEIGHTS, KV_CACHE))
CACHE: frozenset[SleepTag] = frozenset((KV_CACHE,))
PROMPT_TOKENS, NUM_PROMPTS = 900, 24
WEIGHT_BYTES = 2_000_000 * 4
_IDS = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model, whose files a test changes."""
    return Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("sleep") / "model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(settings(model, prompt_kv=True))
    await engine.start("v0")
    yield engine
    await engine.stop()


def request(prompt: list[int], max_tokens: int = 8, **options: Any) -> SampleRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    name = f"s{next(_IDS)}"
    return SampleRequest(id=name, prompt_token_ids=prompt, sampling=sampling, **options)


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
async def test_engine_still_sleeps_after_an_update_that_fails(
    engine: VllmEngine, model: Path, tmp_path: Path
) -> None:
    await fall_asleep(engine, 1, CACHE)
    with pytest.raises(LoadFailed):
        await engine.update_weights(tmp_path, "v1")  # a directory without files
    assert engine.health().stage == "sleeping"
    await engine.wake(ALL)
    assert engine.health().stage == "serving"
    await engine.resume()
    (after,) = await samples(engine, [5, 6, 7] * 20)
    assert [span.version for span in after.versions] == ["v0"]


async def turns(engine: VllmEngine, prompt: list[int]) -> list[Completion]:
    """One turn of a chain that keeps its KV, of a session, and of a caller without either."""
    requests = [
        request(prompt, kept_kv=KeptKv(chain="chain")),
        request(prompt, session_id="session", cache_salt="session"),
        request(prompt, cache_salt=f"new {next(_IDS)}"),
    ]
    return list(await asyncio.gather(*await engine.submit(requests)))


def check_equal(completions: list[Completion], expected: Completion) -> None:
    for completion in completions:
        assert completion.token_ids == expected.token_ids
        assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


@in_module
async def test_kv_of_chains_and_sessions_is_prefilled_again_after_a_sleep(
    engine: VllmEngine, model: Path, tmp_path: Path
) -> None:
    """Its pages read as zeros, so a prefix found in the cache would change the samples."""
    other = Path(shutil.copytree(model, tmp_path / "other"))
    prompt = [5 + i * i % 200 for i in range(6 * BLOCK + 9)]
    await turns(engine, prompt)
    await engine.pause("keep")
    assert await engine.update_weights(other, "v1", keep_kv=True) == 6 * BLOCK
    await engine.resume()
    await turns(engine, prompt)
    chain, session, fresh = await turns(engine, prompt)
    assert (chain.num_cached_tokens, session.num_cached_tokens) == (6 * BLOCK, 6 * BLOCK)
    assert [span.version for span in chain.kv_versions] == ["v0", "v1"]
    check_equal([chain, session], fresh)
    running = request(prompt, max_tokens=60, kept_kv=KeptKv(chain="running"))
    [late] = await engine.submit([running])
    await fall_asleep(engine, 1, CACHE)
    await engine.wake(CACHE)
    await engine.resume()
    after = await turns(engine, prompt)
    assert [completion.num_cached_tokens for completion in after[:2]] == [0, 0]
    assert {span.version for completion in after for span in completion.kv_versions} == {"v1"}
    check_equal(after, fresh)
    assert (await late).token_ids[:8] == fresh.token_ids
    await engine.pause("keep")
    await engine.update_weights(model, "v0")
    await engine.resume()


@in_module
async def test_exported_kv_stays_and_is_exported_during_a_sleep(
    engine: VllmEngine, tmp_path: Path
) -> None:
    assert engine.info.kv_format is not None
    arena = TestArena(tmp_path / "arena", engine.info.kv_format, num_bytes=2**24)
    prompt = [7 + i * i % 190 for i in range(5 * BLOCK)]
    early, late = (arena.slot(len(prompt) - 1) for _ in range(2))
    await asyncio.gather(*await engine.submit([request(prompt, export=early)]))
    await engine.flush_exports()
    before = arena.data(early)
    await fall_asleep(engine, 1, CACHE)
    assert arena.words(early) == [ExportStatus.COMMITTED]
    submitted = await engine.submit([request(prompt, export=late)])
    await engine.wake(CACHE)
    await engine.resume()
    await asyncio.gather(*submitted)
    await engine.flush_exports()
    assert arena.words(late) == [ExportStatus.COMMITTED]
    assert (arena.data(early) == before).all()
    exported, again = (data.view(np.float32) for data in (before, arena.data(late)))
    assert again == pytest.approx(exported, abs=1e-4)
    arena.check()


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
