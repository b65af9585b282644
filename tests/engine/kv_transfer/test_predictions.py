"""Predicted prompts on a real engine.

Compared with an engine that prefills them where both are equal, and with Hugging Face's forward
over the intended KV everywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.hf_kv_prediction import HfPredictor
from bench.harness.hf_splice import HfAssembler
from coppice.wire.rollouts import PromptSpan
from engine.kv_transfer.worker.loader import group_runs
from engine.runtime.feature_guard import features
from engine.types.kv import KvLoad, LoadPiece
from service.kv.spans.prompt_template import joined
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import (
    EXPORTING,
    kv_format,
    max_error,
    reference,
    reference_kv,
    save_model,
)
from tests.engine.kv_transfer.predicted_loads import PredictedLoads
from tests.engine.kv_transfer.test_loads import END, MIDDLE, OWN, tokens
from tests.engine.stepped_engine import Answer, LiveEngine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

CLOSE = 1e-4
# The second is so long that it is predicted in parts.
TEXTS = {"a": (tokens(1, 70), tokens(21, 75)), "b": (tokens(2, 300), tokens(22, 300))}
NEW = {"a": tokens(31, 66), "b": tokens(32, 290)}


def prompt_of(a: list[int], b: list[int], own: list[int] = OWN) -> list[PromptSpan]:
    return [
        PromptSpan(token_ids=own),
        PromptSpan(token_ids=a, cache_key="a"),
        PromptSpan(token_ids=MIDDLE),
        PromptSpan(token_ids=b, cache_key="b"),
        PromptSpan(token_ids=END),
    ]


FIRST, SECOND = (prompt_of(TEXTS["a"][i], TEXTS["b"][i]) for i in range(2))
THIRD = prompt_of(NEW["a"], NEW["b"])
NUM_TOKENS = len(joined(THIRD))


@dataclass(frozen=True)
class Scenario:
    engine: LiveEngine
    predicting: PredictedLoads
    models: dict[str, Path]
    truth: dict[str, Any]

    def expected_kv(self, parts: Sequence[PromptSpan], answer: Answer) -> torch.Tensor:
        """Expected log-probabilities of the answer's tokens, given the predicted KV."""
        predictor = HfPredictor(self.truth["v7"])
        observations = [predictor.observed(known) for known in (FIRST, SECOND)]
        found = predictor.assemble(parts, observations, answer.token_ids, max_entropy=1.0)
        assert found is not None
        return found.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]

    def computed(
        self, parts: Sequence[PromptSpan], answer: Answer, model: str = "v7"
    ) -> torch.Tensor:
        found = HfAssembler(self.truth[model]).dense(joined(parts), answer.token_ids)
        return found.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]


def runs(load: KvLoad) -> list[list[LoadPiece]]:
    """Groups of pieces that are written together."""
    return list(group_runs(load.pieces, 32))


def assert_close(answer: Answer, expected: torch.Tensor) -> None:
    assert (expected - torch.tensor(answer.logprobs)).abs().max() < CLOSE


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "v7": save_model(base / "v7", "qwen3", num_kv_heads=2),
        "v8": save_model(base / "v8", "qwen3", num_kv_heads=2, seed=6),
    }


@pytest.fixture(scope="module")
def truth(models: dict[str, Path]) -> dict[str, Any]:
    return {version: reference(path) for version, path in models.items()}


@pytest.fixture(scope="module")
def shared(models: dict[str, Path]) -> Iterator[LiveEngine]:
    """An engine whose steps are shorter than a prompt."""
    engine = LiveEngine(models["v7"], max_model_len=448, **EXPORTING)
    for answer in engine.rpc("coppice_prepare_kv_export"):
        assert answer["not_movable"] is None
    yield engine
    engine.close()


@pytest.fixture
def scenario(
    shared: LiveEngine, models: dict[str, Path], truth: dict[str, Any], tmp_path: Path
) -> Iterator[Scenario]:
    """An engine with v7, two observations and an empty cache. Every test leaves no state behind."""
    shared.swap(models["v7"])
    arena = TestArena(tmp_path / "arena", kv_format(2), num_bytes=2**23)
    predicting = PredictedLoads(shared, arena)
    predicting.add_observations(FIRST, SECOND)
    yield Scenario(shared, predicting, models, truth)
    arena.check()
    connector = shared.core.scheduler.connector
    assert (connector.export_planner.num_tracked, connector.load_planner.num_pending) == (0, 0)
    assert features()["kv_reuse"].on, "a load broke off"
    pool = shared.core.coppice_check_pool()
    assert pool["num_free_blocks"] == pool["num_blocks"]


@pytest.mark.parametrize(("parts", "taken"), [(FIRST, True), (SECOND, True), (FIRST, False)])
def test_prompt_whose_texts_are_in_an_observation_equals_its_prefill(
    scenario: Scenario, parts: list[PromptSpan], taken: bool
) -> None:
    """In one request, all tokens but the last: taken from that observation, or predicted from both.

    In the second case the other observation has weight zero. Nothing is cached under the salt.
    """
    load = scenario.predicting.load(parts, chain="same", use_exact=taken)
    assert any(piece.observations for piece in load.pieces) is not taken
    [answer] = scenario.engine.finish(*scenario.predicting.submit(parts, load, salt="fresh"))
    assert answer.num_cached_tokens == len(joined(parts)) - 1
    assert_close(answer, scenario.computed(parts, answer))


def test_other_texts_are_predicted_as_intended(scenario: Scenario) -> None:
    """At any temperature; the first sample loads, and the others hit most of it."""
    load = scenario.predicting.load(THIRD, chain="third", n=3)
    assert [run[0].start for run in runs(load)] == [0, 32, 256]
    names = scenario.predicting.submit(THIRD, load, n=3, temperature=1.0)
    for answer in scenario.engine.finish(*names):
        assert answer.num_cached_tokens == NUM_TOKENS - 1
        assert_close(answer, scenario.expected_kv(THIRD, answer))
        far = (scenario.computed(THIRD, answer) - torch.tensor(answer.logprobs)).abs().max()
        assert far > 10 * CLOSE, "the test would not see a difference"


def test_prediction_follows_a_cached_prefix(scenario: Scenario) -> None:
    """Any prompt shares its unnamed text, up to the block with the first predicted token."""
    scenario.engine.ask(OWN, max_tokens=1)
    [first] = scenario.predicting.sample(THIRD, chain="one")
    [plain, salted] = scenario.engine.finish(
        scenario.engine.submit(joined(THIRD), max_tokens=1),
        scenario.engine.submit(joined(THIRD), max_tokens=1, salt="salted"),
    )
    assert_close(first, scenario.expected_kv(THIRD, first))
    assert plain.num_cached_tokens == len(OWN) // 32 * 32
    assert salted.num_cached_tokens == 0


def test_loaded_blocks_are_private_to_their_group(scenario: Scenario) -> None:
    """Exact blocks too: a load may fail after its blocks were hashed."""
    load = scenario.predicting.load(FIRST, chain="exact", n=2)
    assert load.exact_tokens == len(joined(FIRST)) - 1
    names = scenario.predicting.submit(FIRST, load, n=2, salt="fresh")
    for answer in scenario.engine.finish(*names):
        assert answer.num_cached_tokens == len(joined(FIRST)) - 1
        assert_close(answer, scenario.computed(FIRST, answer))
    [plain] = scenario.engine.finish(
        scenario.engine.submit(joined(FIRST), max_tokens=4, salt="fresh")
    )
    assert plain.num_cached_tokens == 0
    assert_close(plain, scenario.computed(FIRST, plain))


def test_two_groups_and_an_export_run_concurrently(scenario: Scenario) -> None:
    """A load and an export share a step."""
    other = prompt_of(NEW["a"][:60], TEXTS["b"][0])
    names = []
    for chain, parts in (("one", THIRD), ("two", other)):
        load = scenario.predicting.load(parts, chain=chain, n=2)
        names += scenario.predicting.submit(parts, load, n=2, temperature=1.0)
    prompt = MIDDLE * 4
    slot = scenario.predicting.slot(len(prompt) - 1)
    names.append(scenario.engine.submit(prompt, export=slot, max_tokens=4))
    *predicted, exported = scenario.engine.finish(*names)
    for parts, answers in ((THIRD, predicted[:2]), (other, predicted[2:])):
        for answer in answers:
            assert_close(answer, scenario.expected_kv(parts, answer))
    assert_close(exported, scenario.computed([PromptSpan(token_ids=prompt)], exported))
    truth = reference_kv(scenario.truth["v7"], prompt, len(prompt) - 1)
    assert max_error(scenario.predicting.arena, slot, truth) < CLOSE


def test_observations_of_other_weights_are_not_loaded(scenario: Scenario) -> None:
    load = scenario.predicting.load(THIRD, chain="old")
    waiting = scenario.predicting.submit(THIRD, replace(load, chain="waits"))
    scenario.engine.swap(scenario.models["v8"])
    for name in [*waiting, *scenario.predicting.submit(THIRD, load)]:
        [answer] = scenario.engine.finish(name)
        assert_close(answer, scenario.computed(THIRD, answer, "v8"))


@pytest.mark.parametrize(
    ("at", "which"), [(1, "source"), (1, "real"), (1, "base"), (-1, "source"), (-1, "real")]
)
def test_pieces_outside_the_arena_are_prefilled(scenario: Scenario, at: int, which: str) -> None:
    """Also if most of the prompt has been written before: the invalid slot is in the last run."""
    load = scenario.predicting.load(THIRD, chain="gone")
    pieces = list(load.pieces)
    ends = [run[-1].end for run in runs(load)]
    assert (pieces[at].start >= ends[-2]) == (at == -1)
    if which == "source":
        gone = replace(pieces[at].source, offset=2**40)
        pieces[at] = replace(pieces[at], source=gone)
    else:
        first, *others = pieces[at].observations
        gone = replace(getattr(first, which), offset=2**40)
        observations = (replace(first, **{which: gone}), *others)
        pieces[at] = replace(pieces[at], observations=observations)
    [answer] = scenario.engine.finish(
        *scenario.predicting.submit(THIRD, replace(load, pieces=tuple(pieces)))
    )
    assert_close(answer, scenario.computed(THIRD, answer))


def test_aborted_prediction_leaves_nothing(scenario: Scenario) -> None:
    for num_steps in (0, 1):
        load = scenario.predicting.load(THIRD, chain=f"aborted-{num_steps}", n=2)
        names = scenario.predicting.submit(THIRD, load, n=2)
        scenario.engine.step(num_steps)
        for name in names:
            scenario.engine.abort(name)
    scenario.engine.ask(MIDDLE, max_tokens=2)
