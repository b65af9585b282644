"""How far a prompt that is put together is from the one that is computed, on the seedling.

The Kullback-Leibler divergence of the distributions of the response's tokens, teacher-forced, over
how many tokens of each segment are computed, and over the prompt's length: an own text, three
peers' as segments, each of one solved problem or more, and a problem to solve. The seedling has
learnt from single problems, so the longer a prompt is the less it knows what to make of it, which
the computed prompt's own surprise at the right answer tells.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.harness.hf_splice import HfAssembler, divergence
from examples.seedling import arithmetic
from service.kv_reuse.layout import PromptSpan, joined, token_runs

SEEDLING = "examples/seedling/model"
NUM_PROMPTS, NUM_TEXTS = 16, 4
PROBLEMS_A_TEXT = (1, 2, 4)


@dataclass(slots=True, kw_only=True)
class Distance:
    """Of prompts of one length: `divergences` prompt by prompt, and which share of their tokens was
    placed, by how many first tokens of a segment were computed."""

    num_tokens: float
    surprise: float
    shares: dict[int, float] = field(default_factory=dict)
    divergences: dict[int, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    parts: list[PromptSpan]
    answer: list[int]


def distances(first_tokens: Sequence[int], block: int) -> list[Distance]:
    model: Any = AutoModelForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32).eval()
    words = AutoTokenizer.from_pretrained(SEEDLING)
    found = []
    for num_problems in PROBLEMS_A_TEXT:
        draw = random.Random(7)
        asked = [_asked(words, draw, num_problems) for _ in range(NUM_PROMPTS)]
        found.append(_distance(HfAssembler(model, block=block), asked, first_tokens, block))
    return found


def _distance(
    placed: HfAssembler, asked: Sequence[Case], first_tokens: Sequence[int], block: int
) -> Distance:
    exact = [placed.dense(joined(one.parts), one.answer) for one in asked]
    distance = Distance(
        num_tokens=statistics.mean(len(joined(one.parts)) for one in asked),
        surprise=statistics.mean(map(_surprise, exact, asked)),
    )
    for first in first_tokens:
        distance.shares[first] = statistics.mean(_share(one.parts, first, block) for one in asked)
        distance.divergences[first] = [
            divergence(true, placed.assemble(one.parts, one.answer, first_tokens=first))
            for true, one in zip(exact, asked, strict=True)
        ]
    return distance


def _asked(words: Any, draw: random.Random, num_problems: int) -> Case:
    """The first text is the agent's own."""
    texts = [
        "".join("".join(_problem(draw)) for _ in range(num_problems)) for _ in range(NUM_TEXTS)
    ]
    parts = [
        PromptSpan(token_ids=words.encode(text), name=str(i) if i else None)
        for i, text in enumerate(texts)
    ]
    ask, answer = _problem(draw)
    return Case(
        parts=[*parts, PromptSpan(token_ids=words.encode(ask))], answer=words.encode(answer)
    )


def _problem(draw: random.Random) -> tuple[str, str]:
    problem = arithmetic.draw(draw, held_out=True)
    return problem.prompt, arithmetic.written_out(problem)


def _share(parts: Sequence[PromptSpan], first_tokens: int, block: int) -> float:
    runs = token_runs(parts, first_tokens=first_tokens, block=block)
    return sum(run.num_tokens for run in runs if run.span is not None) / runs[-1].end


def _surprise(exact: torch.Tensor, asked: Case) -> float:
    return float(-exact.gather(1, torch.tensor(asked.answer)[:, None]).mean())
