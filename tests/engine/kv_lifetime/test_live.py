"""Retained KV of sessions in a real engine, against the same engine without retention."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.kv_lifetime.core.retainer import FEATURE
from tests.engine.model_families import VOCAB, save_family
from tests.engine.stepped_engine import Answer, LiveEngine, Preemptions, live_engine

# Imports of vLLM emit unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

FAMILIES = (
    "dense",
    *(
        pytest.param(f, marks=pytest.mark.exhaustive)
        for f in ("sliding_window", "alternating_windows")
    ),
)
TURN = {"max_tokens": 40, "salt": "session", "session_id": "session"}
ONE_TOKEN = {"max_tokens": 1}


def tokens(seed: int, length: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(2, VOCAB, length).tolist()
    return drawn


@contextmanager
def engine_of(folder: Path, family: str, fraction: float) -> Iterator[LiveEngine]:
    model = folder if (folder / "config.json").exists() else save_family(folder, family)
    with live_engine(model, kv_cache_memory_bytes=2**20) as engine:
        if fraction:
            engine.core.coppice_start_session_kv_retention(fraction, 300.0)
        yield engine
    gc.collect()


def first_turn(engine: LiveEngine) -> list[int]:
    """Tokens of the first turn of a session: its prompt and its sample."""
    prompt = tokens(1, 200)
    [answer] = engine.ask(prompt, **TURN)
    return [*prompt, *answer.token_ids]


def retained(engine: LiveEngine) -> dict[str, Any]:
    """Counters of the retained KV."""
    counted: dict[str, Any] = engine.core.coppice_ping()["features"]["session_kv_retention"]["core"]
    return counted


def flood(engine: LiveEngine) -> None:
    """Prompts of other callers that need the whole cache several times, one after the other."""
    num_blocks = engine.core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    for seed in range(2, 3 + 4 * num_blocks * 32 // 300):
        engine.ask(tokens(seed, 300), **ONE_TOKEN)


def second_turn(engine: LiveEngine, path: list[int]) -> Answer:
    [answer] = engine.ask([*path, *tokens(1000, 24)], **TURN)
    return answer


def play(folder: Path, family: str, fraction: float) -> tuple[Answer, Answer]:
    """The second turn after a pause without, and after a pause with other traffic."""
    with engine_of(folder, family, fraction) as engine:
        path = first_turn(engine)
        after_pause = second_turn(engine, path)
        flood(engine)
        after_flood = second_turn(engine, path)
        state = engine.core.coppice_check_pool()
        assert state["num_references"] == 0
        assert state["num_free_blocks"] == state["num_blocks"]
        return after_pause, after_flood


@pytest.mark.parametrize("family", FAMILIES)
def test_flood_evicts_a_session_only_without_retention(tmp_path: Path, family: str) -> None:
    plain, evicted = play(tmp_path, family, 0.0)
    paused, kept = play(tmp_path, family, 0.5)
    assert plain.num_cached_tokens > 0 and evicted.num_cached_tokens == 0
    assert kept.num_cached_tokens >= paused.num_cached_tokens == plain.num_cached_tokens
    assert kept.token_ids == evicted.token_ids == plain.token_ids
    assert kept.logprobs == pytest.approx(evicted.logprobs, abs=1e-4)
    assert FEATURE.state.on


def whole_cache(folder: Path, fraction: float) -> tuple[list[Answer], int, int]:
    """Answers, steps and preemptions of samples that need more than the whole cache."""
    with engine_of(folder, "dense", fraction) as engine:
        for number in range(4):
            name = f"session {number}"
            engine.ask(tokens(number, 200), max_tokens=8, salt=name, session_id=name)
        preemptions = Preemptions(engine)
        names = [engine.submit(tokens(10 + i, 100), max_tokens=120) for i in range(6)]
        num_steps = 0
        while not all(name in engine._answers for name in names):
            engine.step()
            num_steps += 1
        return engine.finish(*names), num_steps, preemptions.count


@pytest.mark.exhaustive
def test_requests_that_need_the_whole_cache_run_as_without_retention(tmp_path: Path) -> None:
    plain, plain_steps, plain_preemptions = whole_cache(tmp_path, 0.0)
    answers, num_steps, preemptions = whole_cache(tmp_path, 1.0)
    assert plain_preemptions > 0, "the samples do not fit into the cache together"
    assert (num_steps, preemptions) == (plain_steps, plain_preemptions)
    assert [each.token_ids for each in answers] == [each.token_ids for each in plain]


def test_retained_kv_is_released_with_its_weights_and_its_session(tmp_path: Path) -> None:
    with engine_of(tmp_path / "model", "dense", 0.5) as engine:
        path = first_turn(engine)
        assert retained(engine)["num_blocks"] == len(path) // 32
        engine.swap(save_family(tmp_path / "new", "dense", seed=6))
        assert retained(engine)["num_blocks"] == 0
        assert second_turn(engine, path).num_cached_tokens == 0
        engine.core.coppice_release_session_kv(["session", "unknown"])
        snapshot = retained(engine)
        assert snapshot["num_blocks"] == snapshot["num_sessions"] == 0
        assert snapshot["num_released"] == {"reset": 7, "ended": 9, "returned": 0}
        state = engine.core.coppice_check_pool()
        assert state["num_free_blocks"] == state["num_blocks"] and state["num_references"] == 0


@pytest.mark.exhaustive
def test_pause_that_recomputes_releases_retained_kv(tmp_path: Path) -> None:
    with engine_of(tmp_path, "dense", 0.5) as engine:
        path = first_turn(engine)
        with engine.paused(recompute=True):
            assert retained(engine)["num_blocks"] == 0
        assert second_turn(engine, path).num_cached_tokens == 0
