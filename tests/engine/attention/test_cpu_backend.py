"""In a live engine, shared-prefix attention computes the same function as stock attention."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.feature_guard import FeatureState
from tests.engine.attention.sample_groups import StepKinds, assert_all_greedy, sample
from tests.engine.attention.shared_engine import SharedEngine, shared_engine

# Imports of vLLM and its draft methods emit unrelated warnings.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def engine(sharp_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """An engine with chunked prefill and a cache that cannot hold all samples at once."""
    cache = tmp_path_factory.mktemp("cache")
    with shared_engine(
        sharp_model, cache, max_num_batched_tokens=128, kv_cache_memory_bytes=45 * 2**15
    ) as engine:
        yield engine


def test_chunked_and_preempted_samples_with_nested_prefixes_stay_greedy(
    engine: SharedEngine, reference: Any
) -> None:
    kinds = StepKinds(engine)
    with engine.mode("always") as counted:
        answers = sample(engine, 60)
    assert_all_greedy(reference, answers)
    assert counted["steps_grouped"] > 60
    assert counted["rows_grouped"] > 4 * counted["steps_grouped"]
    assert kinds.mixed and kinds.levels and kinds.preempted


def test_logprobs_equal_those_of_stock_attention(engine: SharedEngine) -> None:
    with engine.mode("off") as stock_counted:
        stock = sample(engine, 12)
    with engine.mode("always") as counted:
        shared = sample(engine, 12)
    assert stock_counted["steps_grouped"] == 0 < counted["steps_grouped"]
    for (_, ours), (_, theirs) in zip(shared, stock, strict=True):
        pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
        same = next((i for i, (one, other) in pairs if one != other), len(ours.token_ids))
        assert ours.logprobs[:same] == pytest.approx(theirs.logprobs[:same], abs=1e-4)


def test_failed_step_falls_back_to_stock_attention(engine: SharedEngine, reference: Any) -> None:
    from engine.attention.register import FEATURE

    group_rows = engine.builder.grouper.group_rows

    def failing(*_: Any) -> None:
        raise RuntimeError("no plan today")

    engine.builder.grouper.group_rows = failing
    try:
        with engine.mode("always") as counted:
            answers = sample(engine, 8)
    finally:
        engine.builder.grouper.group_rows = group_rows
        state, FEATURE.state = FEATURE.state, FeatureState(on=True, num_failures=0, reason=None)
    assert_all_greedy(reference, answers)
    assert state.reason == "RuntimeError: no plan today"
    assert counted["steps_grouped"] == 0 < counted["steps_skipped"]["failed"]
