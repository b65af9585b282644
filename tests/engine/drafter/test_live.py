"""A draft model in a real engine, through every event of a sample and of the drafter."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.runtime.feature_guard import features
from tests.engine.drafter.drafter_engine import FIRST, drafter_engine, drafts, num_accepted, read
from tests.engine.greedy import assert_greedy
from tests.engine.random_models import make_models
from tests.engine.speculation.drafting_engine import LONGEST, in_group
from tests.engine.stepped_engine import FAULTY, LiveEngine

pytestmark = pytest.mark.engine

SERVED = 160
PROMPTS = [[5 + group, *range(20, 23 + 11 * group)] for group in range(6)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=True)


@pytest.fixture(scope="module")
def engine(models: dict[str, Path]) -> Iterator[LiveEngine]:
    """An engine that serves v7 with v8 as its drafter, which is never right.

    Prompts are prefilled in chunks, and the cache cannot hold all samples at once.
    """
    with drafter_engine(
        models["v7"],
        models["v8"],
        extension=FAULTY,
        max_model_len=SERVED + LONGEST,
        max_num_batched_tokens=96,
        kv_cache_memory_bytes=2**21,
    ) as engine:
        yield engine


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def serve(
    engine: LiveEngine, models: dict[str, Path], name: str, before_schedule: str
) -> list[Any]:
    answers: list[Any] = engine.core.coppice_set_drafter(
        str(models[name]), str(models[before_schedule]), name, False
    )
    return answers


def submit_groups(engine: LiveEngine, num_tokens: int, **sampling: Any) -> list[list[str]]:
    return [
        [
            engine.submit(prompt, max_tokens=num_tokens, **sampling, **in_group(f"{prompt[0]}"))
            for _ in range(4)
        ]
        for prompt in PROMPTS
    ]


def accepted_of(engine: LiveEngine, drafter: str, weights: str) -> float:
    [pair] = [
        pair
        for pair in read(engine)["pairs"]
        if (pair["drafter"], pair["weights"]) == (drafter, weights)
    ]
    return pair["accepted"] / pair["drafted"]


def test_samples_match_the_model_through_every_event(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    """Chunks, preemptions, an abort, another drafter, other weights."""
    groups = submit_groups(engine, 60)
    engine.step(25)
    engine.abort(groups[0][0])
    assert all(answer["ok"] for answer in serve(engine, models, "v7", "v8"))
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
    assert features()["drafter"].on
    assert accepted_of(engine, FIRST, "v7") < 0.2
    assert accepted_of(engine, "v7", "v8") < 0.2
    engine.swap(models["v7"])


def test_drafter_is_replaced_in_place(engine: LiveEngine, models: dict[str, Path]) -> None:
    """v7 drafts for v7, and is right except where it continues from KV that v8 has left."""
    assert all(answer["ok"] for answer in serve(engine, models, "v7", "v8"))
    before_schedule = num_accepted(engine)
    engine.ask([31, 32, 33], max_tokens=40)
    assert num_accepted(engine) - before_schedule >= 28
    assert read(engine)["serving"] == "v7"


@pytest.mark.parametrize("num_tensors", [0, 7])
def test_interrupted_load_keeps_the_old_drafter(
    engine: LiveEngine, models: dict[str, Path], num_tensors: int
) -> None:
    serve(engine, models, "v7", "v8")
    engine.rpc("coppice_fail_next", num_tensors)
    [answer] = serve(engine, models, "v8", "v7")
    assert (answer["ok"], answer["restored"]) == (False, True)
    assert read(engine)["serving"] == "v7"
    before_schedule = num_accepted(engine)
    engine.ask([41 + num_tensors, 42, 43], max_tokens=40)
    assert num_accepted(engine) - before_schedule >= 28


def test_missing_files_change_nothing(engine: LiveEngine, models: dict[str, Path]) -> None:
    serve(engine, models, "v7", "v8")
    [answer] = serve(engine, models | {"gone": models["v7"] / "gone"}, "gone", "v7")
    assert (answer["ok"], answer["restored"]) == (False, True)
    assert read(engine)["serving"] == "v7"


def test_sample_at_its_limit_costs_others_no_draft(
    engine: LiveEngine, models: dict[str, Path]
) -> None:
    """vLLM would draft zeros for all of them (v1/worker/gpu_model_runner.py:4291)."""
    serve(engine, models, "v7", "v8")
    prompt = [9, *range(30, 30 + SERVED - 40)]
    long = engine.submit(prompt, max_tokens=39)
    short = engine.submit([3, 4], max_tokens=60)
    scheduler, seen = engine.core.scheduler, []
    while scheduler.has_unfinished_requests():
        engine.step()
        seen += [request.spec_token_ids for request in scheduler.requests.values()]
    v7 = reference(models["v7"])
    for name, asked, num in ((long, prompt, 39), (short, [3, 4], 60)):
        [answer] = engine.finish(name)
        assert len(answer.token_ids) == num
        assert_greedy(v7, asked, answer.token_ids)
    assert any(seen)
    assert not any(len(draft) > 1 and not any(draft) for draft in seen)


def test_seeded_sample_is_reproducible_next_to_drafted_samples(engine: LiveEngine) -> None:
    alone = engine.ask([6, 7, 8], max_tokens=20, temperature=1.0, seed=5)
    submit_groups(engine, 20)
    [among] = engine.ask([6, 7, 8], max_tokens=20, temperature=1.0, seed=5)
    assert among.token_ids[:4] == alone[0].token_ids[:4]
    assert drafts(engine)["skipped"]["seeded"] == 2
