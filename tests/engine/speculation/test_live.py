"""Sibling drafts in a real engine, through every event of a sample."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.runtime.feature_guard import FeatureState, features
from engine.speculation import custom_class_proposer as proposers
from engine.speculation.counters import COUNTERS, Snapshot
from engine.speculation.custom_class_proposer import Proposer
from tests.engine.greedy import assert_greedy
from tests.engine.random_models import make_models
from tests.engine.seedling import teacher_forced
from tests.engine.speculation.drafting_engine import (
    LONGEST,
    SendAllDrafts,
    drafting_engine,
    in_group,
)
from tests.engine.stepped_engine import LiveEngine

pytestmark = pytest.mark.engine

SERVED = 160
PROMPTS = [[5 + group, *range(20, 23 + 11 * group)] for group in range(6)]

Drafting = tuple[LiveEngine, Proposer]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=True)


@pytest.fixture(scope="module")
def drafting(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drafting]:
    """An engine with chunked prefill and a cache that cannot hold all samples at once."""
    with drafting_engine(
        models["v7"],
        tmp_path_factory.mktemp("kept"),
        max_model_len=SERVED + LONGEST,
        max_num_batched_tokens=48,
        kv_cache_memory_bytes=2**20,
    ) as drafting:
        yield drafting


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def submit_groups(engine: LiveEngine, num_tokens: int, **sampling: Any) -> list[list[str]]:
    return [
        [
            engine.submit(prompt, max_tokens=num_tokens, **sampling, **in_group(f"{prompt[0]}"))
            for _ in range(4)
        ]
        for prompt in PROMPTS
    ]


def total(counted: Snapshot, kind: str) -> int:
    return sum(counted[kind].values())  # type: ignore[literal-required]


def test_samples_match_the_model_through_every_event(
    drafting: Drafting, models: dict[str, Path]
) -> None:
    engine, proposer = drafting
    before = COUNTERS.read()
    groups = submit_groups(engine, 60)
    engine.step(25)
    engine.abort(groups[0][0])
    engine.step(25)
    engine.swap(models["v8"], recompute=True)
    kept = [(prompt, names[1:]) for prompt, names in zip(PROMPTS, groups, strict=True)]
    by_name = {name: reference(models[name]) for name in models}
    for prompt, names in kept:
        for answer in engine.finish(*names):
            assert len(answer.token_ids) == 60
            for span in answer.versions:
                said = answer.token_ids[: span.start]
                told = answer.token_ids[span.start : span.end]
                assert_greedy(by_name[span.version], prompt + said, told)
    after = COUNTERS.read()
    assert total(after, "accepted") > total(before, "accepted")
    assert after["version_drafted"] < total(after, "drafted")
    assert features()["speculation"].on
    engine.ask([1, 2], max_tokens=2)
    assert proposer.speculator is not None
    assert proposer.speculator.num_rows <= 1
    engine.swap(models["v7"])


def test_sample_at_its_limit_costs_others_no_draft(
    drafting: Drafting, models: dict[str, Path]
) -> None:
    """vLLM would draft zeros for all of them (v1/worker/gpu_model_runner.py:4291)."""
    engine, _ = drafting
    prompt = [9, *range(30, 30 + SERVED - 40)]
    long = [engine.submit(prompt, max_tokens=39, **in_group("long")) for _ in range(2)]
    short = [engine.submit([3, 4], max_tokens=60, **in_group("short")) for _ in range(2)]
    scheduler = engine.core.scheduler
    seen = []
    while scheduler.has_unfinished_requests():
        engine.step()
        seen += [request.spec_token_ids for request in scheduler.requests.values()]
    v7 = reference(models["v7"])
    for name, asked, num in ((long[0], prompt, 39), (short[0], [3, 4], 60)):
        [answer] = engine.finish(name)
        assert len(answer.token_ids) == num
        wanted = teacher_forced(v7, asked, answer.token_ids)
        assert answer.logprobs == pytest.approx(wanted, abs=1e-3)
    assert any(seen)
    assert not any(draft and not any(draft) for draft in seen)


def test_prompt_with_one_token_to_prefill_is_not_padded(drafting: Drafting) -> None:
    """vLLM would pad it to the longest draft (v1/core/sched/scheduler.py:1135)."""
    engine, _ = drafting
    prompt = list(range(40, 40 + 65))
    engine.ask(prompt, max_tokens=2)
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    name = engine.submit(prompt, max_tokens=3)
    engine.step()
    assert int(runner.query_start_loc.np[1]) == 1
    engine.finish(name)


def test_steps_without_drafts_equal_those_of_a_plain_engine(
    drafting: Drafting, models: dict[str, Path]
) -> None:
    engine, proposer = drafting
    assert proposer.speculator is not None
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    sending, proposer.speculator.controller = (
        proposer.speculator.controller,
        AlternatingController(),
    )
    configs = set()
    names = [engine.submit([3, 4], max_tokens=60, **in_group("turns")) for _ in range(4)]
    while engine.core.scheduler.has_unfinished_requests():
        engine.step()
        configs.add(runner.speculative_config is None)
    proposer.speculator.controller = sending
    v7 = reference(models["v7"])
    for answer in engine.finish(*names):
        assert_greedy(v7, [3, 4], answer.token_ids)
    assert configs == {True, False}


def test_first_drafts_are_verified_by_the_next_step(drafting: Drafting) -> None:
    engine, _ = drafting
    engine.ask([7, 9], max_tokens=20, **in_group("known"))
    name = engine.submit([7, 9], max_tokens=20, **in_group("later"))
    engine.step()
    [request] = engine.core.scheduler.requests.values()
    assert len(request.spec_token_ids) == LONGEST
    engine.finish(name)


class AlternatingController(SendAllDrafts):
    """Alternates between requesting drafts and not."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = 0

    def should_draft(self, running: int) -> bool:
        self._asked += 1
        return self._asked % 16 < 8


def test_seeded_sample_is_reproducible_next_to_drafted_samples(drafting: Drafting) -> None:
    engine, _ = drafting
    alone = engine.ask([6, 7, 8], max_tokens=20, temperature=1.0, seed=5)
    submit_groups(engine, 20)
    [among] = engine.ask([6, 7, 8], max_tokens=20, temperature=1.0, seed=5)
    assert among.token_ids[:4] == alone[0].token_ids[:4]


def test_failure_costs_drafts_and_no_sample(drafting: Drafting, models: dict[str, Path]) -> None:
    """The last test of this file: a failure disables the feature process-wide."""
    engine, proposer = drafting
    names = [name for group in submit_groups(engine, 30) for name in group]
    engine.step(10)
    assert proposer.speculator is not None
    del proposer.speculator.store
    answers = engine.finish(*names)
    v7 = reference(models["v7"])
    for prompt, answer in zip([p for p in PROMPTS for _ in range(4)], answers, strict=True):
        assert len(answer.token_ids) == 30
        assert_greedy(v7, prompt, answer.token_ids)
    state = features()["speculation"]
    assert not state.on
    assert COUNTERS.read()["skipped"]["failed"] > 0
    proposers.FEATURE.state = FeatureState(on=True, num_failures=0, reason=None)
