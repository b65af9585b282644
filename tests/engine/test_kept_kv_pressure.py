"""KV that chains keep across weights updates: preemption, eviction, chunked prefills."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.random_models import make_models
from tests.engine.stepped_engine import LiveEngine, Preemptions, live_engine
from tests.engine.test_kept_kv import BLOCK, first_turn, kv

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

FEW_BLOCKS: dict[str, Any] = {"num_gpu_blocks_override": 12, "max_model_len": 320}
SHORT_STEPS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=True)


@pytest.fixture(scope="module")
def shared_engine(models: dict[str, Path]) -> Iterator[LiveEngine]:
    with live_engine(models["v7"], **FEW_BLOCKS, **SHORT_STEPS) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: LiveEngine, models: dict[str, Path]) -> LiveEngine:
    """Serves v7, with an empty prefix cache."""
    shared_engine.swap(models["v7"])
    return shared_engine


def test_evicted_blocks_are_computed_again(engine: LiveEngine, models: dict[str, Path]) -> None:
    tokens = first_turn(engine)
    engine.swap(models["v8"], keep_kv=True)
    engine.ask([5] * 310, max_tokens=1)  # ten of eleven blocks
    [answer] = engine.ask(tokens, max_tokens=2, chain="a")
    num = answer.num_cached_tokens
    assert num < 4 * BLOCK
    found = [("v7", 0, num), ("v8", num, len(tokens) + 1)]
    assert answer.kv_versions == kv(*(span for span in found if span[1] < span[2]))


def test_preempted_request_finds_the_blocks_of_its_chain(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    """Both requests need nine blocks, four of which they share, and there are eleven."""
    tokens = first_turn(engine)
    engine.swap(models["v8"], keep_kv=True)
    preemptions = Preemptions(engine)
    names = [engine.submit(tokens, max_tokens=140, chain="a", seed=i) for i in range(2)]
    answers = engine.finish(*names)
    assert preemptions.count > 0
    assert [len(answer.token_ids) for answer in answers] == [140] * 2
    found = kv(("v7", 0, 4 * BLOCK), ("v8", 4 * BLOCK, len(tokens) + 139))
    for answer in answers:
        assert answer.kv_versions == found, "blocks of v7 are computed again after a preemption"


def test_prompt_prefilled_across_an_update_has_kv_of_both_versions(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    running = engine.submit([(3 * i) % 500 for i in range(200)], max_tokens=3)
    engine.step(2)
    engine.swap(models["v8"])
    [answer] = engine.finish(running)
    assert [span.version for span in answer.versions] == ["v8"]
    [first, second] = answer.kv_versions
    assert (first.version, first.start, second.version, second.end) == ("v7", 0, "v8", 202)
    assert first.end in (64, 128)
