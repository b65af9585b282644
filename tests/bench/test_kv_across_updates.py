"""Teacher forcing over KV of several weights versions, and the benchmark's estimates."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.harness.kv_teacher_forcing import Teacher, Turn
from bench.kv_across_updates import Conversation, Estimate, Result, record_of
from engine.types.samples import KvVersionSpan
from tests.engine.random_models import make_models

TOKENS = [(7 * i) % 400 + 5 for i in range(40)]
NUM_SAMPLED = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), tied=True)


def turn(*spans: tuple[str, int, int], logprobs: list[float] | None = None) -> Turn:
    return Turn(
        version=spans[-1][0],
        token_ids=TOKENS,
        logprobs=logprobs or [0.0] * NUM_SAMPLED,
        kv_versions=[KvVersionSpan(version=v, start=start, end=end) for v, start, end in spans],
    )


def reference(models: dict[str, Path], version: str) -> list[float]:
    """Logprobs of the sampled tokens, from one forward pass without a KV cache."""
    model = AutoModelForCausalLM.from_pretrained(models[version], dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    rows = logits.log_softmax(dim=1)
    first = len(TOKENS) - NUM_SAMPLED
    return [float(rows[at - 1, TOKENS[at]]) for at in range(first, len(TOKENS))]


def test_turn_on_exact_kv_has_the_logprobs_of_a_forward_pass(models: dict[str, Path]) -> None:
    returned = reference(models, "v7")
    forced = Teacher(models).force(turn(("v7", 0, len(TOKENS) - 1), logprobs=returned))
    assert forced.log_ratio_stated == forced.log_ratio_exact
    assert forced.log_ratio_stated == pytest.approx([0.0] * NUM_SAMPLED, abs=1e-4)
    assert forced.kl == [0.0] * NUM_SAMPLED
    assert forced.expected_ratio == pytest.approx([1.0] * NUM_SAMPLED)


def test_spans_of_equal_weights_are_exact(models: dict[str, Path]) -> None:
    same = {"v7": models["v7"], "v9": models["v7"]}
    forced = Teacher(same).force(turn(("v9", 0, 20), ("v7", 20, len(TOKENS) - 1)))
    assert forced.log_ratio_stated == pytest.approx(forced.log_ratio_exact, abs=1e-4)
    assert max(map(abs, forced.kl)) < 1e-6


def test_older_kv_changes_the_distribution_but_not_the_exact_one(models: dict[str, Path]) -> None:
    forced = Teacher(models).force(turn(("v8", 0, 20), ("v7", 20, len(TOKENS) - 1)))
    exact = reference(models, "v7")
    assert [-value for value in forced.log_ratio_exact] == pytest.approx(exact, abs=1e-4)
    assert forced.log_ratio_stated != pytest.approx(forced.log_ratio_exact, abs=1e-3)
    assert min(forced.kl) > 0
    for kl, ratio in zip(forced.kl, forced.expected_ratio, strict=True):
        assert math.log(ratio) >= kl  # Jensen's inequality


def test_error_of_an_estimate_is_that_of_independent_conversations() -> None:
    estimate = Estimate.of([[1.0, 3.0], [4.0, 4.0]])
    assert estimate.mean == 3.0
    assert estimate.error == pytest.approx(1.0)  # of the means 2 and 4
    repeated = Estimate.of([[1.0, 3.0] * 9, [4.0, 4.0] * 9])
    assert repeated.error == pytest.approx(1.0)


def test_record_states_what_kept_kv_costs_and_saves(models: dict[str, Path]) -> None:
    exact = turn(("v7", 0, len(TOKENS) - 1), logprobs=reference(models, "v7"))
    kept = turn(("v8", 0, 20), ("v7", 20, len(TOKENS) - 1))
    found = {
        name: [
            Conversation(number, None, TOKENS, [each], num_prompt=40, num_prefilled=prefilled)
            for number in range(2)
        ]
        for name, each, prefilled in (("recompute all", exact, 40), ("keep all", kept, 10))
    }
    results = {name: Result.of(each, Teacher(models)) for name, each in found.items()}
    rows = {row.what: row for row in record_of(results, num_updates=2).rows}
    assert rows["keep all"].value.startswith("25.0% of prompt tokens prefilled, KL divergence")
    assert rows["recompute all"].verdict == "met"
    stated = "returned probability / teacher forcing over the KV of kv_versions"
    assert rows[f"recompute all: {stated}"].verdict == "met"
    assert rows[f"keep all: {stated}"].verdict == "missed"  # other logprobs were returned
    assert results["keep all"].max_versions == 2
