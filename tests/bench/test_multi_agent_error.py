"""Spliced prompts against prefilled ones, on turns of agents that read each other's answers."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bench.harness.cached_generation import CachedPrompt, generate
from bench.harness.multi_agent_splice_error import (
    PREFILLED,
    AgentEvaluation,
    Assembly,
    Case,
    assembly_modes,
)
from bench.harness.multi_agent_table import agents_rows, change
from examples.seedling import multi_agent_task
from examples.seedling.enlarge import SEEDLING
from service.kv.spans.prompt_template import joined

SHAPE = multi_agent_task.Shape(num_peers=2, own=60, steps=3)


@pytest.fixture(scope="module")
def hearing() -> AgentEvaluation:
    return AgentEvaluation.of(str(SEEDLING))


@pytest.fixture(scope="module")
def asked(hearing: AgentEvaluation) -> list[Case]:
    return hearing.asked(SHAPE, 2)


def noise_of(model: Any, scale: float) -> torch.Tensor:
    chance = torch.Generator().manual_seed(3)
    shape = (24, model.config.vocab_size)
    return scale * -torch.empty(shape).exponential_(generator=chance).log()


def said(
    model: Any, way: Assembly, one: Case, scale: float, draft: Sequence[int] = ()
) -> list[int]:
    prompted = CachedPrompt(cache=way(one.parts).cache, last=joined(one.parts)[-1])
    end = model.config.eos_token_id
    return generate(model, prompted, noise_of(model, scale), draft=draft, end=end)


def one_by_one(model: Any, prompt: list[int], noise: torch.Tensor) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < len(noise) and model.config.eos_token_id not in tokens:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1]
        tokens.append(int((logits + noise[len(tokens)]).argmax()))
    return tokens


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_answer_equals_step_by_step_decoding_whatever_its_draft(
    hearing: AgentEvaluation, asked: list[Case], scale: float
) -> None:
    model, prompt = hearing.model, joined(asked[0].parts)
    computed = assembly_modes(model, [], 16)[PREFILLED]
    expected = one_by_one(model, prompt, noise_of(model, scale))
    for draft in ([], asked[0].answer, expected, [*expected[:5], 7, *expected[6:]]):
        assert said(model, computed, asked[0], scale, draft) == expected


def test_fully_recomputed_prompt_equals_the_prefilled_one(
    hearing: AgentEvaluation, asked: list[Case]
) -> None:
    ways = assembly_modes(hearing.model, [0, 512], 16)
    scores = hearing.scores(asked, ways)
    assert scores.shares["spliced (512 recomputed per span)"] == [0.0, 0.0]
    assert max(scores.divergences["spliced (512 recomputed per span)"]) < 1e-5
    assert min(scores.shares["spliced (0 recomputed per span)"]) > 0.2
    assert min(scores.divergences["spliced (0 recomputed per span)"]) > 1e-4
    for scale in (0.0, 1.0):
        whole, computed = (
            said(hearing.model, ways[way], asked[0], scale)
            for way in ("spliced (512 recomputed per span)", PREFILLED)
        )
        assert whole == computed


def test_turns_are_deterministic(hearing: AgentEvaluation, asked: list[Case]) -> None:
    assert hearing.asked(SHAPE, 2) == asked


def test_rows_compare_each_mode_with_the_prefilled_prompt(
    hearing: AgentEvaluation, asked: list[Case]
) -> None:
    rows = agents_rows([hearing.scores(asked[:1], assembly_modes(hearing.model, [0], 16))])
    told = [row.what.partition(" tokens: ")[2] for row in rows]
    assert told == [
        "negative log-likelihood of the right answer, prefilled",
        "KL divergence, spliced (0 recomputed per span)",
        "right answers, greedy, prefilled",
        "right answers, greedy, spliced (0 recomputed per span)",
        "right answers, temperature 1, prefilled",
        "right answers, temperature 1, spliced (0 recomputed per span)",
        "probability of the right answer, prefilled",
        "probability of the right answer, spliced (0 recomputed per span)",
    ]


def test_verdict_is_clear_only_if_the_whole_interval_meets_the_goal() -> None:
    right = [1.0] * 120
    assert change(right, right).verdict(1.0) == "met"
    assert change(right, [0.0] * 30 + [1.0] * 90).verdict(1.0) == "missed"
    assert change(right, [0.0] + [1.0] * 119).verdict(1.0) == "met, within noise"
    assert change(right, [0.0] * 2 + [1.0] * 118).verdict(1.0) == "missed, within noise"
