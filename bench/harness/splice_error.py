"""Measures how far spliced prompts change the distributions of the seedling (test model).

The KL divergence of the distributions at the response's tokens, teacher-forced, over the number of
recomputed tokens per span, and over the prompt's length. A prompt is an own text, three peers'
texts as spans, each of one or more solved problems, and a problem to solve. The seedling was
trained on single problems, so longer prompts are less familiar, as the surprise of the prefilled
prompt at the right answer shows.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.harness.hf_splice import HfAssembler, divergence
from coppice.wire.rollouts import PromptSpan
from examples.seedling import arithmetic
from service.kv.spans.prompt_template import joined
from service.kv.spans.spliced_prompt import token_runs

SEEDLING = "examples/seedling/model"
NUM_PROMPTS, NUM_TEXTS = 16, 4
PROBLEMS_A_TEXT = (1, 2, 4)


@dataclass(slots=True, kw_only=True)
class Distance:
    """Divergence of spliced from prefilled prompts, for prompts of one length.

    `shares` is the spliced fraction of their tokens and `divergences` the divergence per prompt, by
    number of recomputed first tokens per span.
    """

    num_tokens: float
    surprise: float
    shares: dict[int, float] = field(default_factory=dict)
    divergences: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    parts: list[PromptSpan]
    answer: list[int]


def distances(recompute_tokens: Sequence[int], block: int) -> list[Distance]:
    model: Any = AutoModelForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32).eval()
    words = AutoTokenizer.from_pretrained(SEEDLING)
    found = []
    for num_problems in PROBLEMS_A_TEXT:
        draw = random.Random(7)
        asked = [_asked(words, draw, num_problems) for _ in range(NUM_PROMPTS)]
        found.append(_distance(HfAssembler(model, block=block), asked, recompute_tokens, block))
    return found


def _distance(
    placed: HfAssembler, asked: Sequence[Case], recompute_tokens: Sequence[int], block: int
) -> Distance:
    exact = [placed.dense(joined(one.parts), one.answer) for one in asked]
    distance = Distance(
        num_tokens=statistics.mean(len(joined(one.parts)) for one in asked),
        surprise=statistics.mean(map(_surprise, exact, asked)),
    )
    for first in recompute_tokens:
        distance.shares[first] = statistics.mean(_share(one.parts, first, block) for one in asked)
        distance.divergences[first] = [
            divergence(true, placed.assemble(one.parts, one.answer, recompute_tokens=first))
            for true, one in zip(exact, asked, strict=True)
        ]
    return distance


def _asked(words: Any, draw: random.Random, num_problems: int) -> Case:
    """Draw a prompt of solved problems and a final problem, with the right answer.

    The first text is the agent's own.
    """
    texts = [
        "".join("".join(_problem(draw)) for _ in range(num_problems)) for _ in range(NUM_TEXTS)
    ]
    parts = [
        PromptSpan(token_ids=words.encode(text), cache_key=str(i) if i else None)
        for i, text in enumerate(texts)
    ]
    ask, answer = _problem(draw)
    return Case(
        parts=[*parts, PromptSpan(token_ids=words.encode(ask))], answer=words.encode(answer)
    )


def _problem(draw: random.Random) -> tuple[str, str]:
    problem = arithmetic.draw(draw, held_out=True)
    return problem.prompt, arithmetic.written_out(problem)


def _share(parts: Sequence[PromptSpan], recompute_tokens: int, block: int) -> float:
    runs = token_runs(parts, recompute_tokens=recompute_tokens, block=block)
    return sum(run.num_tokens for run in runs if run.span is not None) / runs[-1].end


def _surprise(exact: torch.Tensor, asked: Case) -> float:
    return float(-exact.gather(1, torch.tensor(asked.answer)[:, None]).mean())
