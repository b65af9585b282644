"""Exports of prompts that are chunked, preempted, aborted or straddle a weights update."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.types.kv import ExportSlot, ExportStatus
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import (
    COMMITTED,
    PENDING,
    exporting,
    kv_format,
    max_error,
    reference,
    reference_kv,
)
from tests.engine.random_models import make_models
from tests.engine.stepped_engine import LiveEngine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-4
BLOCK_BYTES = 2 * 2 * 2 * 32 * 32 * 4
NUM_BLOCKS = 13  # one of which vLLM never allocates
PROMPT = [(11 * i) % 500 for i in range(150)]  # three chunks


@dataclass(frozen=True)
class Scenario:
    engine: LiveEngine
    arena: TestArena
    models: dict[str, Path]
    truth: dict[str, Any]

    def submit(self, prompt: list[int], **sampling: Any) -> tuple[str, ExportSlot]:
        slot = self.arena.slot(len(prompt) - 1)
        return self.engine.submit(prompt, export=slot, **sampling), slot

    def max_error(self, slot: ExportSlot, prompt: list[int], version: str) -> float:
        return max_error(
            self.arena, slot, reference_kv(self.truth[version], prompt, len(prompt) - 1)
        )

    def request(self, name: str) -> Any:
        found = self.engine.core.scheduler.requests.values()
        return next(request for request in found if request.request_id.startswith(name))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=True)


@pytest.fixture(scope="module")
def shared(models: dict[str, Path]) -> Iterator[LiveEngine]:
    engine = exporting(
        models["v7"], max_model_len=256, kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_BYTES
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def truth(models: dict[str, Path]) -> dict[str, Any]:
    return {version: reference(path) for version, path in models.items()}


@pytest.fixture
def scenario(
    shared: LiveEngine, models: dict[str, Path], truth: dict[str, Any], tmp_path: Path
) -> Iterator[Scenario]:
    """An engine with v7 and an empty cache.

    Every test leaves no state behind and all blocks free.
    """
    shared.swap(models["v7"])
    arena = TestArena(tmp_path / "arena", kv_format(2))
    yield Scenario(shared, arena, models, truth)
    arena.check()
    assert shared.core.scheduler.connector.export_planner.num_tracked == 0
    pool = shared.core.coppice_check_pool()
    assert pool["num_free_blocks"] == pool["num_blocks"]
    assert (pool["num_references"], pool["num_requests"], pool["num_tables"]) == (0, 0, 0)


def test_export_is_complete_while_its_sample_still_decodes(scenario: Scenario) -> None:
    name, slot = scenario.submit(PROMPT, max_tokens=20)
    scenario.engine.step(2)
    assert scenario.arena.words(slot) == PENDING
    scenario.engine.step()
    assert scenario.arena.words(slot) == COMMITTED
    assert scenario.max_error(slot, PROMPT, "v7") < TOLERANCE
    whole = scenario.arena.data(slot)
    scenario.engine.finish(name)
    assert (scenario.arena.data(slot) == whole).all()


def test_export_does_not_wait_for_the_last_token(scenario: Scenario) -> None:
    """After two chunks of 64, only the last token is missing, which is not exported."""
    prompt = PROMPT[:129]
    name, slot = scenario.submit(prompt, max_tokens=2)
    scenario.engine.step(2)
    assert scenario.arena.words(slot) == COMMITTED
    assert scenario.max_error(slot, prompt, "v7") < TOLERANCE
    scenario.engine.finish(name)


def test_two_groups_with_one_prompt_both_get_an_export(scenario: Scenario) -> None:
    (one, first), (other, second) = (scenario.submit(PROMPT, max_tokens=3) for _ in "ab")
    scenario.engine.finish(one, other)
    for slot in (first, second):
        assert scenario.arena.words(slot) == COMMITTED
        assert scenario.max_error(slot, PROMPT, "v7") < TOLERANCE


def test_preempted_prompt_is_exported_after_it_is_prefilled_again(scenario: Scenario) -> None:
    """Six others allocate a second block each during its prefill: all twelve blocks."""
    others = [scenario.engine.submit([20 + i] * 30, max_tokens=30) for i in range(6)]
    scenario.engine.step(2)
    name, slot = scenario.submit(PROMPT, max_tokens=3)
    request = scenario.request(name)
    while request.num_preemptions == 0:
        scenario.engine.step()
        assert scenario.arena.words(slot) == PENDING
    scenario.engine.finish(name, *others)
    assert scenario.arena.words(slot) == COMMITTED
    assert scenario.max_error(slot, PROMPT, "v7") < TOLERANCE


def test_prompt_aborted_during_its_prefill_is_never_exported(scenario: Scenario) -> None:
    name, slot = scenario.submit(PROMPT, max_tokens=3)
    scenario.engine.step()
    scenario.engine.abort(name)
    assert scenario.engine.rpc("coppice_flush_exports") == [True]
    scenario.engine.finish(scenario.engine.submit(PROMPT, max_tokens=3))
    assert scenario.arena.words(slot) == PENDING
    assert scenario.arena.untouched(slot)


def test_prompt_prefilled_by_two_versions_is_refused(scenario: Scenario) -> None:
    name, slot = scenario.submit(PROMPT, max_tokens=3)
    scenario.engine.step()
    scenario.engine.swap(scenario.models["v8"])
    scenario.engine.finish(name)
    assert scenario.arena.words(slot) == [ExportStatus.MIXED_VERSION]
    assert scenario.arena.untouched(slot)
    again, after = scenario.submit(PROMPT, max_tokens=3)
    scenario.engine.finish(again)
    assert scenario.arena.words(after) == COMMITTED
    assert scenario.max_error(after, PROMPT, "v8") < TOLERANCE


def test_prompt_that_waited_for_new_weights_belongs_to_them(scenario: Scenario) -> None:
    """It was prefilled before under the old weights, and must not hit their cache."""
    scenario.engine.ask(PROMPT, max_tokens=2)
    name, slot = scenario.submit(PROMPT, max_tokens=3)
    scenario.engine.swap(scenario.models["v8"])
    scenario.engine.finish(name)
    assert scenario.arena.words(slot) == COMMITTED
    assert scenario.max_error(slot, PROMPT, "v8") < TOLERANCE


@pytest.mark.parametrize(("num_steps", "version"), [(1, "v8"), (3, "v7")])
def test_prompt_prefilled_twice_is_exported_once(
    scenario: Scenario, num_steps: int, version: str
) -> None:
    """Restarted midway it belongs to the new weights; complete before, to the old ones."""
    name, slot = scenario.submit(PROMPT, max_tokens=30)
    scenario.engine.step(num_steps)
    on_exported = scenario.arena.words(slot)
    assert on_exported == (COMMITTED if version == "v7" else PENDING)
    scenario.engine.swap(scenario.models["v8"], recompute=True)
    scenario.engine.finish(name)
    assert scenario.arena.words(slot) == COMMITTED
    assert scenario.max_error(slot, PROMPT, version) < TOLERANCE
