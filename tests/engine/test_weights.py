"""Weights updated in a running engine: no KV or token of one version is served as another's."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from engine.types.samples import VersionSpan
from engine.weights.checkpoint import read_base_checkpoint
from engine.weights.validation import check_checkpoint
from tests.engine.greedy import assert_greedy
from tests.engine.random_models import in_bfloat16, make_models, random_tensors, write_model
from tests.engine.stepped_engine import FAULTY, Answer, LiveEngine, assert_same, live_engine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BLOCK = 32
SHORT, LONG = list(range(5, 8)), list(range(10, 110))
PROMPTS = (SHORT, LONG)
SETTINGS: dict[str, Any] = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 3,
    "kv_cache_metrics": True,
    "kv_cache_metrics_sample": 1.0,
    "kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Greedy answers to PROMPTS of engines that started from these weights."""

    v7: list[Answer]
    v8: list[Answer]


def answers_of_a_fresh_engine(model: Path) -> list[Answer]:
    with live_engine(model, **SETTINGS) as engine:
        return engine.ask(*PROMPTS, max_tokens=40)


@pytest.fixture(
    scope="module",
    params=[True, pytest.param(False, marks=pytest.mark.exhaustive)],
    ids=["tied", "untied"],
)
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=request.param)


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> Expected:
    return Expected(
        v7=answers_of_a_fresh_engine(models["v7"]), v8=answers_of_a_fresh_engine(models["v8"])
    )


@pytest.fixture(scope="module")
def shared_engine(models: dict[str, Path], expected: Expected) -> Iterator[LiveEngine]:
    with live_engine(models["v7"], extension=FAULTY, **SETTINGS) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: LiveEngine, models: dict[str, Path]) -> Iterator[LiveEngine]:
    """An engine with v7 and an empty cache. Every test leaves it idle and all blocks free."""
    shared_engine.swap(models["v7"])
    yield shared_engine
    pool = shared_engine.core.coppice_check_pool()
    assert pool["num_free_blocks"] == pool["num_blocks"]
    assert (pool["num_references"], pool["num_requests"], pool["num_tables"]) == (0, 0, 0)
    assert pool["num_hashes"] <= pool["num_hashed_blocks"]  # equal blocks share a hash


def spans(*parts: tuple[str, int, int]) -> list[VersionSpan]:
    return [VersionSpan(version=v, start=start, end=end) for v, start, end in parts]


def test_update_in_flight_gives_the_answers_of_a_fresh_engine(
    engine: LiveEngine, models: dict[str, Path], expected: Expected
) -> None:
    assert_same(engine.ask(*PROMPTS, max_tokens=40), expected.v7)
    straddler = engine.submit(range(200, 230), max_tokens=100)
    engine.step(10)
    engine.swap(models["v8"])
    assert_same(engine.ask(*PROMPTS, max_tokens=40), expected.v8)
    engine.finish(straddler)


def test_weights_in_bfloat16_are_served_in_float32(
    engine: LiveEngine, models: dict[str, Path], tmp_path: Path
) -> None:
    model = in_bfloat16(models["v8"], tmp_path / "v9")
    check_checkpoint(read_base_checkpoint(models["v7"]), model, dtype="float32")
    engine.swap(model)
    answers = engine.ask(*PROMPTS, max_tokens=40)
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert_greedy(oracle, prompt, answer.token_ids)


def test_request_running_across_an_update_has_two_version_spans(
    engine: LiveEngine, models: dict[str, Path], expected: Expected
) -> None:
    straddler = engine.submit(SHORT, max_tokens=40)
    engine.step(10)
    engine.swap(models["v8"])
    (answer,) = engine.finish(straddler)
    assert answer.versions == spans(("v7", 0, 10), ("v8", 10, 40))
    assert answer.token_ids[:10] == expected.v7[0].token_ids[:10]
    assert answer.token_ids != expected.v7[0].token_ids


def test_request_waiting_across_an_update_uses_only_the_new_weights(
    engine: LiveEngine, models: dict[str, Path], expected: Expected
) -> None:
    engine.ask(LONG, max_tokens=1)
    running = [engine.submit(range(200 + i, 230 + i), max_tokens=100) for i in range(3)]
    engine.step(5)
    waiting = engine.submit(LONG, max_tokens=40)
    engine.step(5)
    assert engine.core.coppice_ping()["num_waiting"] == 1
    engine.swap(models["v8"])
    (answer,) = engine.finish(waiting)
    engine.finish(*running)
    assert answer.versions == spans(("v8", 0, 40))
    assert answer.num_cached_tokens == 0
    assert_same([answer], expected.v8[1:])


def test_no_cached_block_is_hit_after_a_rollback(
    engine: LiveEngine, models: dict[str, Path], expected: Expected
) -> None:
    (first,) = engine.ask(LONG, max_tokens=40)
    engine.swap(models["v8"])
    (other,) = engine.ask(LONG, max_tokens=40)
    engine.swap(models["v7"])
    (again,) = engine.ask(LONG, max_tokens=40)
    (cached,) = engine.ask(LONG, max_tokens=40)
    assert (first.num_cached_tokens, other.num_cached_tokens, again.num_cached_tokens) == (0, 0, 0)
    assert cached.num_cached_tokens == 3 * BLOCK
    assert_same([first, other, again, cached], [expected.v7[1], expected.v8[1], *[first] * 2])
    assert again.logprobs == first.logprobs


@pytest.mark.parametrize("prompt", PROMPTS, ids=["within a block", "over several"])
def test_running_requests_publish_no_block_of_mixed_versions(
    engine: LiveEngine, models: dict[str, Path], prompt: list[int]
) -> None:
    """A later prompt must not reach blocks of the straddling request through clean ones."""
    straddler = engine.submit(prompt, max_tokens=200)
    engine.step(8)
    engine.swap(models["v8"])
    (answer,) = engine.finish(straddler)
    conversation = prompt + answer.token_ids
    engine.ask(prompt, max_tokens=1)
    (continued,) = engine.ask(conversation, max_tokens=20)
    assert continued.num_cached_tokens == len(prompt) // BLOCK * BLOCK
    engine.swap(models["v8"])
    (recomputed,) = engine.ask(conversation, max_tokens=20)
    assert recomputed.num_cached_tokens == 0
    assert_same([continued], [recomputed])


def test_prompt_half_prefilled_at_an_update_is_not_published(
    engine: LiveEngine, models: dict[str, Path], expected: Expected
) -> None:
    straddler = engine.submit(LONG, max_tokens=40)
    engine.step()
    engine.swap(models["v8"])
    (answer,) = engine.finish(straddler)
    assert answer.versions == spans(("v8", 0, 40))
    (clean,) = engine.ask(LONG, max_tokens=40)
    assert clean.num_cached_tokens == 0
    assert_same([clean], expected.v8[1:])


def test_prefix_cache_is_reset_only_while_paused(engine: LiveEngine) -> None:
    with pytest.raises(AssertionError, match="while paused"):
        engine.core.coppice_reset_prefix_cache()


def test_reset_reports_what_it_did(engine: LiveEngine) -> None:
    engine.ask(LONG, max_tokens=1)
    straddler = engine.submit(SHORT, max_tokens=30)
    engine.step()
    with engine.paused():
        forgotten = engine.core.coppice_reset_prefix_cache()
        pool = engine.core.coppice_check_pool()
    engine.finish(straddler)
    assert forgotten == {
        "num_hashes": 3,
        "num_kept_tokens": 0,
        "num_running_requests": 1,
        "connector": True,
    }
    assert (pool["num_hashes"], pool["num_hashed_blocks"], pool["num_references"]) == (0, 0, 1)


def test_cache_event_listeners_receive_the_reset(engine: LiveEngine) -> None:
    pool = engine.core.scheduler.kv_cache_manager.block_pool
    engine.ask(LONG, max_tokens=1)
    assert pool.metrics_collector.block_metrics
    with engine.paused():
        engine.core.coppice_reset_prefix_cache()
    assert not pool.metrics_collector.block_metrics
    assert [type(event).__name__ for event in pool.take_events()][-1] == "AllBlocksCleared"


@pytest.mark.parametrize("num_tensors", [0, 1, 9, 20])
def test_interrupted_load_keeps_the_previous_weights(
    engine: LiveEngine, models: dict[str, Path], num_tensors: int
) -> None:
    (undisturbed,) = engine.ask(LONG, max_tokens=40)
    engine.swap(models["v7"])
    straddler = engine.submit(LONG, max_tokens=40)
    engine.step(10)
    with engine.paused():
        engine.rpc("coppice_fail_next", num_tensors)
        (answer,) = engine.load(models["v8"])
    assert answer == {
        "ok": False,
        "error": "OSError: the disk is gone",
        "restored": True,
        "has_reloaded": True,
    }
    (straddled,) = engine.finish(straddler)
    assert straddled == undisturbed


def test_load_succeeds_after_an_interrupted_one(
    engine: LiveEngine, models: dict[str, Path], expected: Expected
) -> None:
    engine.rpc("coppice_fail_next", 9)
    assert not engine.load(models["v8"])[0]["ok"]
    engine.swap(models["v8"])
    assert_same(engine.ask(*PROMPTS, max_tokens=40), expected.v8)


def test_files_changed_since_their_check_change_nothing(
    engine: LiveEngine, tmp_path: Path, expected: Expected
) -> None:
    tensors = random_tensors(8, tied=False)
    del tensors["model.norm.weight"]
    (answer,) = engine.load(write_model(tmp_path / "other", tensors, tied=False))
    assert "missing: " in answer["error"] and "model.norm.weight" in answer["error"]
    assert answer["restored"]
    assert_same(engine.ask(*PROMPTS, max_tokens=40), expected.v7)


def test_shards_of_another_dtype_give_the_same_model(
    engine: LiveEngine, models: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(models["v8"] / "model.safetensors")
    halves = {name: values.astype(np.float16) for name, values in tensors.items()}
    singles = {name: values.astype(np.float32) for name, values in halves.items()}
    tied = "lm_head.weight" not in tensors
    engine.swap(write_model(tmp_path / "float32", singles, tied=tied))
    expected = engine.ask(*PROMPTS, max_tokens=40)
    engine.swap(models["v7"])
    engine.swap(write_model(tmp_path / "float16", halves, tied=tied, num_shards=3))
    assert [a.logprobs for a in engine.ask(*PROMPTS, max_tokens=40)] == [
        a.logprobs for a in expected
    ]


@pytest.mark.parametrize("models", [True], ids=["tied"], indirect=True)
def test_head_that_repeats_the_embedding_is_skipped(
    engine: LiveEngine, models: dict[str, Path], tmp_path: Path, expected: Expected
) -> None:
    tensors = load_file(models["v8"] / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    candidate = write_model(tmp_path / "v8", tensors, tied=True)
    check_checkpoint(read_base_checkpoint(models["v7"]), candidate)
    engine.swap(candidate)
    assert_same(engine.ask(*PROMPTS, max_tokens=40), expected.v8)


def test_nothing_is_changed_without_a_way_to_restore_it(
    engine: LiveEngine, models: dict[str, Path], expected: Expected
) -> None:
    absent = str(models["v7"] / "absent")
    (answer,) = engine.rpc("coppice_load_weights", str(models["v8"]), absent)
    assert answer == {
        "ok": False,
        "error": "CheckpointRefused: the checkpoint does not exist",
        "restored": True,
        "has_reloaded": False,
    }
    assert_same(engine.ask(*PROMPTS, max_tokens=40), expected.v7)


def test_failed_restore_of_the_previous_weights_is_reported(
    engine: LiveEngine, models: dict[str, Path], expected: Expected
) -> None:
    engine.rpc("coppice_fail_next", 9, 2)
    (answer,) = engine.load(models["v8"])
    assert answer == {
        "ok": False,
        "error": "OSError: the disk is gone",
        "restored": False,
        "has_reloaded": False,
    }
    engine.rpc("coppice_reset")
    engine.swap(models["v7"])
    assert_same(engine.ask(*PROMPTS, max_tokens=40), expected.v7)


def test_worker_reports_its_rank_and_process(engine: LiveEngine) -> None:
    (info,) = engine.rpc("coppice_info")
    assert info["rank"] == 0 and info["num_threads"] >= 1 and info["affinity"]
    assert engine.core.coppice_ping()["pid"] == info["pid"]
