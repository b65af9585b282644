"""Prompts whose keys and values are put together, on a real engine, against one that computes them.

In a model of one layer the keys and values of a token depend on nothing before it, so there what is
placed from elsewhere is exact, wherever it stands: any difference is an error of the way there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from service.reuse.spans import Part, joined
from tests.arena import TestArena
from tests.engine.kv.chains import Chains
from tests.engine.kv.exporting import (
    COMMITTED,
    EXPORTING,
    kv_format,
    reference,
    save_model,
    true_kv,
    worst,
)
from tests.engine.live import Answer, LiveEngine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

CLOSE = 1e-4
BLOCK_BYTES = 2 * 2 * 32 * 32 * 4
NUM_BLOCKS = 30


def tokens(seed: int, num: int) -> list[int]:
    return [(seed * 131 + 17 * i + i * i) % 500 for i in range(num)]


A, B, C = tokens(1, 70), tokens(2, 45), tokens(3, 33)
OWN, MIDDLE, END = tokens(4, 50), tokens(5, 3), tokens(6, 9)
PROMPTS = {
    "one hole": [Part(token_ids=OWN), Part(token_ids=A, name="a"), Part(token_ids=END)],
    "three holes": [
        Part(token_ids=OWN),
        Part(token_ids=A, name="a"),
        Part(token_ids=MIDDLE),
        Part(token_ids=B, name="b"),
        Part(token_ids=C, name="c"),
        Part(token_ids=END),
    ],
    "a segment at the end": [Part(token_ids=MIDDLE), Part(token_ids=C, name="c")],
    "a segment first": [
        Part(token_ids=B, name="b"),
        Part(token_ids=A, name="a"),
        Part(token_ids=END),
    ],
}


@dataclass(frozen=True)
class Scene:
    engine: LiveEngine
    chains: Chains
    models: dict[str, Path]
    truth: dict[str, Any]

    def request(self, name: str) -> Any:
        found = self.engine.core.scheduler.requests.values()
        return next(request for request in found if request.request_id.startswith(name))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        "v7": save_model(base / "v7", "qwen3", num_kv_heads=2, num_hidden_layers=1),
        "v8": save_model(base / "v8", "qwen3", num_kv_heads=2, num_hidden_layers=1, seed=6),
    }


@pytest.fixture(scope="module")
def shared(models: dict[str, Path]) -> Iterator[LiveEngine]:
    engine = LiveEngine(
        models["v7"],
        max_model_len=320,
        kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_BYTES,
        **EXPORTING,
    )
    for answer in engine.rpc("coppice_prepare_exports"):
        assert answer["not_movable"] is None
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def truth(models: dict[str, Path]) -> dict[str, Any]:
    return {version: reference(path) for version, path in models.items()}


@pytest.fixture
def scene(
    shared: LiveEngine, models: dict[str, Path], truth: dict[str, Any], tmp_path: Path
) -> Iterator[Scene]:
    """Serves v7 with nothing cached; every test leaves nothing tracked and a whole pool."""
    shared.swap(models["v7"])
    arena = TestArena(tmp_path / "arena", kv_format(2, num_layers=1))
    yield Scene(shared, Chains(shared, arena), models, truth)
    arena.check()
    connector = shared.core.scheduler.connector
    assert (connector.planner.num_tracked, connector.loads.num_asked) == (0, 0)
    pool = shared.core.coppice_check_pool()
    assert pool["num_free_blocks"] == pool["num_blocks"]
    assert (pool["num_references"], pool["num_requests"], pool["num_tables"]) == (0, 0, 0)


def assert_as_computed(model: Any, prompt: Sequence[int], answer: Answer) -> None:
    """Teacher-forced: the log-probabilities of its tokens are those of the model's own forward."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert (chosen - torch.tensor(answer.logprobs)).abs().max() < CLOSE


@pytest.mark.parametrize("first_tokens", [0, 1, 16, 40, 100])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_chain_equals_the_prompt_that_is_computed(
    scene: Scene, prompt: str, first_tokens: int
) -> None:
    parts = PROMPTS[prompt]
    scene.chains.keep(A, B, C)
    answers = scene.chains.sample(parts, first_tokens=first_tokens, n=3)
    for answer in answers:
        assert_as_computed(scene.truth["v7"], joined(parts), answer)


def test_a_moved_segment_is_really_moved(scene: Scene) -> None:
    """Without the turn of its keys the same chain is far off, so the tests above see it."""
    parts = PROMPTS["one hole"]
    scene.chains.keep(A)
    load = scene.chains.load(parts, salt="unmoved", first_tokens=16)
    assert load is not None and load.pieces[1].shift == len(OWN)
    unmoved = replace(load, pieces=(load.pieces[0], replace(load.pieces[1], shift=0)))
    name = scene.engine.submit(joined(parts), load=unmoved, salt="unmoved", max_tokens=20)
    [answer] = scene.engine.finish(name)
    with pytest.raises(AssertionError):
        assert_as_computed(scene.truth["v7"], joined(parts), answer)


def test_two_chains_and_an_ordinary_prompt_run_side_by_side(scene: Scene) -> None:
    """At any temperature; one sample draws, and all are of the prompt that is computed."""
    one, other = PROMPTS["one hole"], PROMPTS["three holes"]
    scene.chains.keep(A, B, C)
    submit = scene.engine.submit
    loads = [scene.chains.load(p, salt=s, first_tokens=8) for p, s in ((one, "1"), (other, "2"))]
    names = [
        submit(joined(one), load=loads[0], salt="1", max_tokens=12, temperature=1.0, seed=3),
        submit(joined(other), load=loads[1], salt="2", max_tokens=12),
        submit(joined(other), max_tokens=12),
    ]
    drawn, placed, plain = scene.engine.finish(*names)
    assert_as_computed(scene.truth["v7"], joined(one), drawn)
    assert_as_computed(scene.truth["v7"], joined(other), placed)
    assert_as_computed(scene.truth["v7"], joined(other), plain)


def test_what_a_chain_places_is_found_by_nobody_else(scene: Scene) -> None:
    """Not without a salt, nor with another chain's."""
    parts = PROMPTS["three holes"]
    scene.chains.keep(A, B, C)
    scene.chains.sample(parts, first_tokens=0, salt="mine")
    names = [
        scene.engine.submit(joined(parts), max_tokens=1, salt=salt) for salt in (None, "another")
    ]
    plain, another = scene.engine.finish(*names)
    assert plain.num_cached_tokens == len(OWN) // 32 * 32  # the first link's, which is exact
    assert another.num_cached_tokens == 0


def test_segments_of_other_weights_are_computed_instead(scene: Scene) -> None:
    parts = PROMPTS["three holes"]
    scene.chains.keep(A, B, C)
    load = scene.chains.load(parts, salt="old", first_tokens=8)
    scene.engine.swap(scene.models["v8"])
    name = scene.engine.submit(joined(parts), load=load, salt="old", max_tokens=20)
    [answer] = scene.engine.finish(name)
    assert answer.num_cached_tokens == 0
    assert_as_computed(scene.truth["v8"], joined(parts), answer)


def test_a_sample_that_waited_for_the_new_weights_computes_its_prompt(scene: Scene) -> None:
    parts = PROMPTS["one hole"]
    scene.chains.keep(A)
    load = scene.chains.load(parts, salt="waits", first_tokens=8)
    name = scene.engine.submit(joined(parts), load=load, salt="waits", max_tokens=20)
    scene.engine.swap(scene.models["v8"])
    [answer] = scene.engine.finish(name)
    assert_as_computed(scene.truth["v8"], joined(parts), answer)


def test_a_preempted_sample_loads_again(scene: Scene) -> None:
    """Others grow until it has to leave the cache in the middle of its response."""
    parts = PROMPTS["three holes"]
    scene.chains.keep(A, B, C)
    load = scene.chains.load(parts, salt="preempted", first_tokens=8)
    others = [scene.engine.submit(tokens(20 + i, 30), max_tokens=140) for i in range(6)]
    scene.engine.step(2)
    name = scene.engine.submit(joined(parts), load=load, salt="preempted", max_tokens=100)
    request = scene.request(name)
    [answer, *_] = scene.engine.finish(name, *others)
    assert request.num_preemptions > 0
    assert_as_computed(scene.truth["v7"], joined(parts), answer)


def test_an_aborted_sample_leaves_nothing(scene: Scene) -> None:
    """Before it is scheduled, and in the middle of what it computes itself."""
    parts = [*PROMPTS["one hole"], Part(token_ids=tokens(9, 100))]
    scene.chains.keep(A)
    load = scene.chains.load(parts, salt="aborted", first_tokens=8)
    for num_steps in (0, 1):
        name = scene.engine.submit(joined(parts), load=load, salt="aborted", max_tokens=20)
        scene.engine.step(num_steps)
        scene.engine.abort(name)
    scene.engine.ask(MIDDLE, max_tokens=2)


def test_a_place_that_is_not_there_is_computed_and_the_next_load_is_taken(scene: Scene) -> None:
    """Two siblings share the blocks that could not be filled."""
    parts = PROMPTS["one hole"]
    scene.chains.keep(A)
    load = scene.chains.load(parts, salt="gone", first_tokens=8)
    assert load is not None
    outside = replace(load.pieces[1].source, offset=2**40)
    gone = replace(load, pieces=(load.pieces[0], replace(load.pieces[1], source=outside)))
    names = [
        scene.engine.submit(joined(parts), load=gone, salt="gone", max_tokens=20) for _ in range(2)
    ]
    for answer in scene.engine.finish(*names):
        assert_as_computed(scene.truth["v7"], joined(parts), answer)
    [again] = scene.chains.sample(parts, first_tokens=8, salt="again")
    assert again.num_cached_tokens > 0
    assert_as_computed(scene.truth["v7"], joined(parts), again)


def test_segments_in_one_order_are_a_prefix_that_is_cached(scene: Scene) -> None:
    """What the mode `order` lives from, on vLLM's own count."""
    first, second = [*A, *B, *OWN], [*A, *B, *END]
    scene.engine.ask(first, max_tokens=1)
    [apart] = scene.engine.ask([*OWN, *B, *A], max_tokens=1)
    [ordered] = scene.engine.ask(second, max_tokens=1)
    assert ordered.num_cached_tokens == (len(A) + len(B)) // 32 * 32
    assert apart.num_cached_tokens == 0


def test_a_load_and_an_export_share_a_step(scene: Scene) -> None:
    """And a chain's own link loads and is exported in one."""
    parts = PROMPTS["three holes"]
    scene.chains.keep(A, B, C)
    load = scene.chains.load(parts, salt="step", first_tokens=8)
    prompt = tokens(8, 40)
    slot = scene.chains.slot(len(prompt) - 1)
    names = [
        scene.engine.submit(joined(parts), load=load, salt="step", max_tokens=9),
        scene.engine.submit(prompt, export=slot, max_tokens=9),
    ]
    scene.engine.step()
    assert scene.chains.arena.words(slot) == COMMITTED
    placed, exported = scene.engine.finish(*names)
    assert_as_computed(scene.truth["v7"], joined(parts), placed)
    assert_as_computed(scene.truth["v7"], prompt, exported)
    truth = true_kv(scene.truth["v7"], prompt, len(prompt) - 1)
    assert worst(scene.chains.arena, slot, truth) < CLOSE
