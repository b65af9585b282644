"""KV of running samples, exported by one engine and loaded by another, for all samples of a group.

The engine of the tests is both: its prefix cache is reset in between.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine.kv_types import ExportSlot, ExportStatus, KvLoad, LoadPiece
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import (
    COMMITTED,
    assert_nothing_is_left,
    exporting,
    kv_format,
    max_error,
    reference,
    reference_kv,
)
from tests.engine.random_models import make_models
from tests.engine.stepped_engine import Answer, LiveEngine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BLOCK = 32
PROMPT = [(11 * i) % 500 for i in range(70)]
SHARED = 64
"""Tokens of the prompt in full blocks."""
LENGTHS = (30, 90, 27)


@dataclass(frozen=True)
class Scenario:
    engine: LiveEngine
    arena: TestArena
    models: dict[str, Path]

    def texts(self) -> list[list[int]]:
        """Prompt and tokens of samples whose KV is in the prefix cache."""
        names = [
            self.engine.submit(PROMPT, temperature=1.0, seed=seed, max_tokens=length)
            for seed, length in enumerate(LENGTHS)
        ]
        return [[*PROMPT, *answer.token_ids] for answer in self.engine.finish(*names)]

    def export(
        self, tokens: Sequence[int], first: int, end: int, load: KvLoad | None = None
    ) -> tuple[ExportSlot, int]:
        """Export tokens [first, end); returns the number of tokens that were computed for it."""
        slot = replace(self.arena.slot(end - first), first_token=first, name=f"{first}-{tokens}")
        name = self.engine.submit(tokens[: end + 1], export=slot, load=load, max_tokens=1)
        (answer,) = self.engine.finish(name)
        return slot, end + 1 - answer.num_cached_tokens

    def reset(self) -> None:
        with self.engine.paused():
            self.engine.core.coppice_reset_prefix_cache()

    def go_on(
        self, texts: Sequence[list[int]], loads: Sequence[KvLoad | None], max_tokens: int = 8
    ) -> list[Answer]:
        """Greedy continuations of the samples, after a reset of the prefix cache."""
        names = [
            self.engine.submit(text, load=load, max_tokens=max_tokens)
            for text, load in zip(texts, loads, strict=True)
        ]
        return self.engine.finish(*names)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=True)


@pytest.fixture(scope="module")
def shared(models: dict[str, Path]) -> Iterator[LiveEngine]:
    engine = exporting(models["v7"], max_model_len=256)
    yield engine
    engine.close()


@pytest.fixture
def scenario(shared: LiveEngine, models: dict[str, Path], tmp_path: Path) -> Iterator[Scenario]:
    shared.swap(models["v7"])
    arena = TestArena(tmp_path / "arena", kv_format(2))
    yield Scenario(shared, arena, models)
    arena.check()
    assert_nothing_is_left(shared)


def ends(texts: Sequence[Sequence[int]]) -> list[int]:
    """Number of tokens in full blocks, of those that have KV: the last token has none."""
    return [(len(text) - 1) // BLOCK * BLOCK for text in texts]


def loads_of(texts: Sequence[list[int]], slots: Sequence[ExportSlot]) -> list[KvLoad | None]:
    """Loads of a prompt's slot, and of a slot per sample."""
    prompt, *own = (
        LoadPiece(
            source=slot, token_offset=0, num_tokens=slot.num_tokens, start=slot.first_token, shift=0
        )
        for slot in slots
    )
    return [
        KvLoad(chain="group", num_requests=len(texts), exact_tokens=0, pieces=(prompt, piece))
        for piece in own
    ]


def exported_group(scenario: Scenario, texts: Sequence[list[int]]) -> list[ExportSlot]:
    slots = [scenario.export(texts[0], 0, SHARED)[0]]
    slots += [
        scenario.export(text, SHARED, end)[0] for text, end in zip(texts, ends(texts), strict=True)
    ]
    return slots


def test_export_from_a_later_token_has_the_kv_of_prompt_and_sampled_tokens(
    scenario: Scenario,
) -> None:
    text = scenario.texts()[1]
    (end,) = ends([text])
    slot, num_computed = scenario.export(text, SHARED, end)
    assert scenario.arena.words(slot) == COMMITTED
    assert num_computed == 1
    truth = reference_kv(reference(scenario.models["v7"]), text, end)[:, :, :, SHARED:]
    assert max_error(scenario.arena, slot, truth) < 1e-4


def test_export_from_a_token_inside_a_block_fails(scenario: Scenario) -> None:
    slot, _ = scenario.export(PROMPT, 7, 64)
    assert scenario.arena.words(slot) == [ExportStatus.FAILED]
    assert scenario.arena.untouched(slot)


def test_samples_of_a_group_load_all_full_blocks_and_share_those_of_the_prompt(
    scenario: Scenario,
) -> None:
    texts = scenario.texts()
    slots = exported_group(scenario, texts)
    scenario.reset()
    prefilled = scenario.go_on(texts, [None] * 3)
    scenario.reset()
    scenario.engine.core.coppice_add_exported_kv([slot.name for slot in slots])
    names = [
        scenario.engine.submit(text, load=load, max_tokens=8)
        for text, load in zip(texts, loads_of(texts, slots), strict=True)
    ]
    scenario.engine.step()
    pool = scenario.engine.core.coppice_check_pool()
    num_tokens = SHARED + sum(len(text) - SHARED for text in texts)
    assert pool["num_blocks"] - pool["num_free_blocks"] <= num_tokens // BLOCK + 2 * len(texts)
    loaded = scenario.engine.finish(*names)
    assert [answer.num_cached_tokens for answer in loaded] == ends(texts)
    assert [answer.token_ids for answer in loaded] == [each.token_ids for each in prefilled]
    for one, other in zip(loaded, prefilled, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("case", ["removed", "never added", "reset after"])
def test_samples_prefill_what_they_may_not_load(scenario: Scenario, case: str) -> None:
    texts = scenario.texts()
    slots = exported_group(scenario, texts)
    names = [slot.name for slot in slots]
    scenario.reset()
    expected = scenario.go_on(texts, [None] * 3)
    if case == "reset after":
        scenario.engine.core.coppice_add_exported_kv(names)
    scenario.reset()
    if case == "removed":
        scenario.engine.core.coppice_add_exported_kv(names)
        scenario.engine.core.coppice_remove_exported_kv(names)
    answers = scenario.go_on(texts, loads_of(texts, slots))
    assert [answer.token_ids for answer in answers] == [each.token_ids for each in expected]
    assert answers[0].num_cached_tokens == 0


@pytest.mark.parametrize("is_cached", [False, True])
def test_loaded_kv_is_exported_again_by_a_request_of_its_chain(
    scenario: Scenario, is_cached: bool
) -> None:
    """With that of new tokens, and also if the prompt was in the receiver's cache before."""
    texts = scenario.texts()
    slots = exported_group(scenario, texts)
    scenario.reset()
    if is_cached:
        scenario.engine.finish(scenario.engine.submit(PROMPT, max_tokens=1))
    scenario.engine.core.coppice_add_exported_kv([slot.name for slot in slots])
    loads = loads_of(texts, slots)
    answers = scenario.go_on(texts, loads, max_tokens=2 * BLOCK + 5)
    text, load = [*texts[1], *answers[1].token_ids], loads[1]
    assert load is not None
    (end,) = ends([text])
    for first, until in ((0, SHARED), (SHARED, end)):
        slot, num_computed = scenario.export(text, first, until, load.of_chain)
        assert scenario.arena.words(slot) == COMMITTED
        assert num_computed == 1
        truth = reference_kv(reference(scenario.models["v7"]), text, until)[:, :, :, first:]
        assert max_error(scenario.arena, slot, truth) < 1e-4
