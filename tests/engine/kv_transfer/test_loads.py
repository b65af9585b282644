"""Spliced prompts on a real engine, against one that prefills them.

In a model of one layer, the KV of a token is independent of earlier tokens. So splicing from any
position is exact there, and any difference is an error of the transfer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.wire.rollouts import PromptSpan
from service.kv.spans.prompt_template import joined
from service.kv.spans.spliced_prompt import prefill_lengths
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import (
    COMMITTED,
    EXPORTING,
    assert_nothing_is_left,
    kv_format,
    max_error,
    reference,
    reference_kv,
    save_model,
)
from tests.engine.kv_transfer.load_chains import Chains, spans
from tests.engine.stepped_engine import Answer, LiveEngine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

CLOSE = 1e-4
BLOCK_BYTES = 2 * 2 * 32 * 32 * 4
NUM_BLOCKS = 30


def tokens(seed: int, num: int) -> list[int]:
    return [(seed * 131 + 17 * i + i * i) % 500 for i in range(num)]


A, B, C = tokens(1, 70), tokens(2, 75), tokens(3, 70)
D, E = tokens(10, 64), tokens(11, 64)
OWN, MIDDLE, END = tokens(4, 50), tokens(5, 3), tokens(6, 9)
PROMPTS = {
    "one hole": [
        PromptSpan(token_ids=OWN),
        PromptSpan(token_ids=A, cache_key="a"),
        PromptSpan(token_ids=END),
    ],
    "three holes": [
        PromptSpan(token_ids=OWN),
        PromptSpan(token_ids=A, cache_key="a"),
        PromptSpan(token_ids=MIDDLE),
        PromptSpan(token_ids=B, cache_key="b"),
        PromptSpan(token_ids=C, cache_key="c"),
        PromptSpan(token_ids=END),
    ],
    "two that touch": [
        PromptSpan(token_ids=tokens(12, 32)),
        PromptSpan(token_ids=D, cache_key="d"),
        PromptSpan(token_ids=E, cache_key="e"),
        PromptSpan(token_ids=END),
    ],
    "a span at the end": [PromptSpan(token_ids=MIDDLE), PromptSpan(token_ids=C, cache_key="c")],
    "a span first": [
        PromptSpan(token_ids=B, cache_key="b"),
        PromptSpan(token_ids=A, cache_key="a"),
        PromptSpan(token_ids=END),
    ],
}


@dataclass(frozen=True)
class Scenario:
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
        max_model_len=448,
        kv_cache_memory_bytes=NUM_BLOCKS * BLOCK_BYTES,
        **EXPORTING,
    )
    for answer in engine.rpc("coppice_prepare_kv_export"):
        assert answer["not_movable"] is None
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
    arena = TestArena(tmp_path / "arena", kv_format(2, num_layers=1))
    yield Scenario(shared, Chains(shared, arena), models, truth)
    arena.check()
    assert_nothing_is_left(shared)


def assert_matches_model(model: Any, prompt: Sequence[int], answer: Answer) -> None:
    """Teacher-forced: the log-probabilities of its tokens match the model's own forward."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert (chosen - torch.tensor(answer.logprobs)).abs().max() < CLOSE


@pytest.mark.parametrize("recompute_tokens", [0, 1, 16, 40, 100])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_chain_equals_the_prefilled_prompt(
    scenario: Scenario, prompt: str, recompute_tokens: int
) -> None:
    parts = PROMPTS[prompt]
    scenario.chains.export(*(part.token_ids for part in parts if part.cache_key))
    answers = scenario.chains.sample(parts, recompute_tokens=recompute_tokens, n=3)
    for answer in answers:
        assert_matches_model(scenario.truth["v7"], joined(parts), answer)


@pytest.mark.parametrize("recompute_tokens", [0, 8])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_all_spliced_tokens_are_loaded_and_the_rest_prefilled(
    scenario: Scenario, prompt: str, recompute_tokens: int
) -> None:
    """Even if the step's token budget splits it into several steps."""
    parts = PROMPTS[prompt]
    scenario.chains.export(*(part.token_ids for part in parts if part.cache_key))
    last = spans(parts, recompute_tokens=recompute_tokens)[-1]
    [answer] = scenario.chains.sample(parts, recompute_tokens=recompute_tokens)
    assert answer.num_cached_tokens == last.start


def test_chain_takes_one_step(scenario: Scenario) -> None:
    """With its prefix cached: every link, and the first tokens of the samples after them."""
    parts = PROMPTS["one hole"]
    scenario.chains.export(A)
    scenario.engine.ask(OWN, max_tokens=1)
    load = scenario.chains.load(parts, chain="one step", recompute_tokens=8, n=2)
    names = scenario.chains.submit(parts, load, recompute_tokens=8, n=2, max_tokens=1)
    scenario.engine.step()
    requests = scenario.engine.core.scheduler.requests
    assert not requests, "all had their one token"
    for answer in scenario.engine.finish(*names):
        assert_matches_model(scenario.truth["v7"], joined(parts), answer)


def test_incomplete_chain_proceeds(scenario: Scenario) -> None:
    """A link without the one before it prefills what is not cached."""
    parts = PROMPTS["three holes"]
    scenario.chains.export(A, B, C)
    load = scenario.chains.load(parts, chain="torn", recompute_tokens=8)
    name = scenario.engine.submit(joined(parts), load=load, max_tokens=20)
    [answer] = scenario.engine.finish(name)
    assert answer.num_cached_tokens == 0
    assert_matches_model(scenario.truth["v7"], joined(parts), answer)


def test_moved_span_needs_its_keys_shifted(scenario: Scenario) -> None:
    """Without the RoPE shift the same chain has large errors, so the tests above detect it."""
    parts = PROMPTS["one hole"]
    scenario.chains.export(A)
    load = scenario.chains.load(parts, chain="unmoved", recompute_tokens=8)
    assert load is not None and load.pieces[0].shift == len(OWN)
    unmoved = replace(load, pieces=(replace(load.pieces[0], shift=0),))
    [answer] = scenario.engine.finish(*scenario.chains.submit(parts, unmoved, recompute_tokens=8))
    with pytest.raises(AssertionError):
        assert_matches_model(scenario.truth["v7"], joined(parts), answer)


def test_two_chains_and_an_ordinary_prompt_run_concurrently(scenario: Scenario) -> None:
    """At any temperature; one sample is random, and all match the prefilled prompt."""
    one, other = PROMPTS["one hole"], PROMPTS["three holes"]
    scenario.chains.export(A, B, C)
    names = []
    for parts, temperature in ((one, 1.0), (other, 0.0)):
        load = scenario.chains.load(parts, chain=str(temperature), recompute_tokens=8)
        names += scenario.chains.submit(
            parts, load, recompute_tokens=8, max_tokens=12, temperature=temperature, seed=3
        )
    names.append(scenario.engine.submit(joined(other), max_tokens=12))
    drawn, placed, plain = scenario.engine.finish(*names)
    assert_matches_model(scenario.truth["v7"], joined(one), drawn)
    assert_matches_model(scenario.truth["v7"], joined(other), placed)
    assert_matches_model(scenario.truth["v7"], joined(other), plain)


def test_spliced_blocks_are_private_to_their_chain(scenario: Scenario) -> None:
    """No other request or chain hits them, nor the blocks of the response."""
    parts = PROMPTS["three holes"]
    scenario.chains.export(A, B, C)
    [placed] = scenario.chains.sample(parts, recompute_tokens=0, chain="mine")
    before = spans(parts, recompute_tokens=0)[0].end
    longer = [*joined(parts), *placed.token_ids, 3]
    load = scenario.chains.load(parts, chain="another", recompute_tokens=0)
    names = [
        scenario.engine.submit(longer, max_tokens=1),
        scenario.engine.submit(longer, max_tokens=1, load=load),
        scenario.engine.submit(longer, max_tokens=1, salt="salted"),
    ]
    plain, another, salted = scenario.engine.finish(*names)
    assert plain.num_cached_tokens == before  # those of the first link, which is exact
    assert another.num_cached_tokens == spans(parts, recompute_tokens=0)[1].end
    assert salted.num_cached_tokens == 0


def test_spans_of_other_weights_are_prefilled_instead(scenario: Scenario) -> None:
    parts = PROMPTS["three holes"]
    scenario.chains.export(A, B, C)
    load = scenario.chains.load(parts, chain="old", recompute_tokens=8)
    scenario.engine.swap(scenario.models["v8"])
    [answer] = scenario.engine.finish(*scenario.chains.submit(parts, load, recompute_tokens=8))
    assert_matches_model(scenario.truth["v8"], joined(parts), answer)


def test_chain_that_waited_for_new_weights_prefills_its_prompt(scenario: Scenario) -> None:
    parts = PROMPTS["one hole"]
    scenario.chains.export(A)
    load = scenario.chains.load(parts, chain="waits", recompute_tokens=8)
    names = scenario.chains.submit(parts, load, recompute_tokens=8)
    scenario.engine.swap(scenario.models["v8"])
    [answer] = scenario.engine.finish(*names)
    assert_matches_model(scenario.truth["v8"], joined(parts), answer)


def test_weights_updated_within_a_chain_leave_no_old_kv_in_its_samples(
    scenario: Scenario,
) -> None:
    parts = PROMPTS["three holes"]
    scenario.chains.export(A, B, C)
    load = scenario.chains.load(parts, chain="torn by weights", recompute_tokens=8)
    assert load is not None
    links = [joined(parts)[:end] for end in prefill_lengths(spans(parts, recompute_tokens=8))]
    alone = replace(load, num_requests=1)
    scenario.engine.finish(
        *[scenario.engine.submit(p, load=alone, max_tokens=1) for p in links[:2]]
    )
    scenario.engine.swap(scenario.models["v8"])
    for link in links[2:]:
        scenario.engine.submit(link, load=alone, max_tokens=1)
    name = scenario.engine.submit(joined(parts), load=alone, max_tokens=20)
    [answer] = scenario.engine.finish(name)
    assert_matches_model(scenario.truth["v8"], joined(parts), answer)


def test_preempted_sample_loads_again(scenario: Scenario) -> None:
    """Other samples grow until it is preempted in the middle of its response."""
    parts = PROMPTS["three holes"]
    scenario.chains.export(A, B, C)
    load = scenario.chains.load(parts, chain="preempted", recompute_tokens=8)
    others = [scenario.engine.submit(tokens(20 + i, 30), max_tokens=140) for i in range(6)]
    scenario.engine.step(2)
    [name] = scenario.chains.submit(parts, load, recompute_tokens=8, max_tokens=100)
    request = scenario.request(name)
    [answer, *_] = scenario.engine.finish(name, *others)
    assert request.num_preemptions > 0
    assert_matches_model(scenario.truth["v7"], joined(parts), answer)


def test_aborted_chain_leaves_nothing(scenario: Scenario) -> None:
    """Before it is complete, before it is scheduled, and in the middle of its prefill."""
    parts = [*PROMPTS["one hole"], PromptSpan(token_ids=tokens(9, 100))]
    scenario.chains.export(A)
    load = scenario.chains.load(parts, chain="aborted", recompute_tokens=8)
    name = scenario.engine.submit(joined(parts), load=load, max_tokens=20)
    scenario.engine.step()
    scenario.engine.abort(name)
    for num_steps in (0, 1, 2):
        load = scenario.chains.load(parts, chain=f"aborted-{num_steps}", recompute_tokens=8)
        [name] = scenario.chains.submit(parts, load, recompute_tokens=8)
        scenario.engine.step(num_steps)
        for request in list(scenario.engine.core.scheduler.requests.values()):
            scenario.engine.abort(request.request_id.rpartition("-")[0])
    scenario.engine.ask(MIDDLE, max_tokens=2)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_missing_slot_is_prefilled_and_the_next_load_succeeds(
    scenario: Scenario, which: int
) -> None:
    """Requests that share the blocks that failed to load are correct too."""
    parts = PROMPTS["three holes"]
    scenario.chains.export(A, B, C)
    load = scenario.chains.load(parts, chain="gone", recompute_tokens=8, n=2)
    assert load is not None
    pieces = list(load.pieces)
    pieces[which] = replace(pieces[which], source=replace(pieces[which].source, offset=2**40))
    gone = replace(load, pieces=tuple(pieces))
    for answer in scenario.engine.finish(
        *scenario.chains.submit(parts, gone, recompute_tokens=8, n=2)
    ):
        assert_matches_model(scenario.truth["v7"], joined(parts), answer)
    [again] = scenario.chains.sample(parts, recompute_tokens=8, chain="again")
    assert again.num_cached_tokens > 0
    assert_matches_model(scenario.truth["v7"], joined(parts), again)


def test_spans_in_a_stable_order_hit_the_prefix_cache(scenario: Scenario) -> None:
    """The basis of mode `order`, on vLLM's own count."""
    first, second = [*A, *B, *OWN], [*A, *B, *END]
    scenario.engine.ask(first, max_tokens=1)
    [apart] = scenario.engine.ask([*OWN, *B, *A], max_tokens=1)
    [ordered] = scenario.engine.ask(second, max_tokens=1)
    assert ordered.num_cached_tokens == (len(A) + len(B)) // 32 * 32
    assert apart.num_cached_tokens == 0


def test_load_and_export_share_a_step(scenario: Scenario) -> None:
    parts = PROMPTS["one hole"]
    scenario.chains.export(A)
    scenario.engine.ask(OWN, max_tokens=1)
    load = scenario.chains.load(parts, chain="step", recompute_tokens=0)
    prompt = MIDDLE * 4
    slot = scenario.chains.slot(len(prompt) - 1)
    [name] = scenario.chains.submit(parts, load, recompute_tokens=0, max_tokens=9)
    other = scenario.engine.submit(prompt, export=slot, max_tokens=9)
    scenario.engine.step()
    assert scenario.chains.arena.words(slot) == COMMITTED
    placed, exported = scenario.engine.finish(name, other)
    assert placed.num_cached_tokens == len(OWN) + len(A)
    assert_matches_model(scenario.truth["v7"], joined(parts), placed)
    assert_matches_model(scenario.truth["v7"], prompt, exported)
    truth = reference_kv(scenario.truth["v7"], prompt, len(prompt) - 1)
    assert max_error(scenario.chains.arena, slot, truth) < CLOSE
