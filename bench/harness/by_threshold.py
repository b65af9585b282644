"""How far prompts that are predicted from anchors are from computed ones, on the seedling, and how
many are predicted, over the threshold.

Agents whose own text stays and who hear three others say something else in every round; each
problem is one of its own. As in the service, what is not predicted is computed and an anchor then.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.harness.distance import SEEDLING
from bench.harness.foreseen import Foreseen
from bench.harness.placed import Placed, divergence
from examples.seedling import arithmetic
from service.reuse.anchors import Anchor
from service.reuse.spans import Part, joined

THRESHOLDS = (0.1, 0.3, 0.5, 0.9)
NUM_AGENTS, NUM_ROUNDS, NUM_HEARD = 4, 12, 3


@dataclass(slots=True, kw_only=True)
class Predictions:
    """By threshold: the divergences, in nats a token, of what was predicted of `num_prompts`, and
    which share of all tokens was not computed."""

    num_prompts: int
    num_tokens: float
    divergences: dict[float, list[float]] = field(default_factory=dict)
    reused: dict[float, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    parts: list[Part]
    answer: list[int]
    exact: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return len(joined(self.parts))


def predictions(num_problems: int) -> Predictions:
    """With so many solved problems in each text."""
    model: Any = AutoModelForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32).eval()
    words, draw = AutoTokenizer.from_pretrained(SEEDLING), random.Random(11)
    agents = [_rounds(model, words, draw, num_problems) for _ in range(NUM_AGENTS)]
    lengths = [one.num_tokens for rounds in agents for one in rounds]
    found = Predictions(num_prompts=len(lengths), num_tokens=statistics.mean(lengths))
    for threshold in THRESHOLDS:
        found.divergences[threshold] = []
        reused = sum(_talk(model, rounds, threshold, found) for rounds in agents)
        found.reused[threshold] = reused / sum(lengths)
    return found


def _talk(model: Any, rounds: Sequence[Round], threshold: float, found: Predictions) -> int:
    """Tokens that were not computed."""
    foreseen, anchors, num_reused = Foreseen(model), list[Anchor](), 0
    for one in rounds:
        told = foreseen.put_together(one.parts, anchors, one.answer, threshold=threshold)
        if told is None:
            anchors.append(foreseen.anchor(one.parts))
            continue
        found.divergences[threshold].append(divergence(one.exact, told))
        num_reused += sum(len(part.token_ids) for part in one.parts[:-1])
    return num_reused


def _rounds(model: Any, words: Any, draw: random.Random, num_problems: int) -> list[Round]:
    own, placed = Part(token_ids=_text(words, draw, num_problems)), Placed(model)
    rounds = []
    for _ in range(NUM_ROUNDS):
        heard = [
            Part(token_ids=_text(words, draw, num_problems), name=str(i)) for i in range(NUM_HEARD)
        ]
        problem = arithmetic.draw(draw, held_out=True)
        parts = [own, *heard, Part(token_ids=words.encode(problem.prompt))]
        answer = words.encode(arithmetic.written_out(problem))
        exact = placed.dense(joined(parts), answer)
        rounds.append(Round(parts=parts, answer=answer, exact=exact))
    return rounds


def _text(words: Any, draw: random.Random, num_problems: int) -> list[int]:
    problems = [arithmetic.draw(draw, held_out=True) for _ in range(num_problems)]
    tokens: list[int] = words.encode(
        "".join(problem.prompt + arithmetic.written_out(problem) for problem in problems)
    )
    return tokens
