"""Benchmark: error of predicted KV, and share of prompts predicted, by prediction threshold.

The model is the seedling (test model). Agents keep their own text and receive three other messages,
different in every round; each problem is unique. As in the service, a prompt that cannot be
predicted is prefilled and becomes an observation, from which others are predicted. Each
threshold predicts different prompts, so the error is also given over all prompts, with zero for
prefilled ones.
"""

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.harness.hf_kv_prediction import HfPredictor
from bench.harness.hf_splice import HfAssembler, divergence
from bench.harness.record import Row
from bench.harness.splice_error import SEEDLING
from coppice.wire.rollouts import PromptSpan
from examples.seedling import arithmetic
from service.kv.spans.observations import Observation
from service.kv.spans.prompt_template import joined

THRESHOLDS = (0.1, 0.3, 0.5, 0.9)
NUM_AGENTS, NUM_ROUNDS, NUM_HEARD = 4, 12, 3
FEWEST = 10
"""Minimum number of predicted prompts for a verdict on their mean."""


@dataclass(slots=True, kw_only=True)
class Tokens:
    """Counts of reused and prefilled prompt tokens, as the service would count them.

    A span that is not `known` yet is prefilled alone, whether or not its prompt is predicted.
    Prefix caching is not counted.
    """

    reused: int = 0
    computed: int = 0
    known: set[tuple[int, ...]] = field(default_factory=set)

    def count(self, parts: Sequence[PromptSpan], *, predicted: bool) -> None:
        new = {tuple(part.token_ids) for part in parts if part.cache_key is not None} - self.known
        self.known |= new
        num_last, num_tokens = len(parts[-1].token_ids), len(joined(parts))
        self.reused += num_tokens - num_last if predicted else 0
        self.computed += sum(map(len, new)) + (num_last if predicted else num_tokens)


@dataclass(slots=True, kw_only=True)
class Predictions:
    """Errors of predicted prompts and fractions of reused tokens, by prediction threshold.

    `divergences` are those of predicted prompts, in nats per token; `num_prompts` counts all
    prompts. `reused` is the fraction of tokens not prefilled, counting only spans.
    """

    num_prompts: int
    num_tokens: float
    divergences: dict[float, list[float]] = field(default_factory=dict)
    reused: dict[float, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    parts: list[PromptSpan]
    answer: list[int]
    exact: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return len(joined(self.parts))


def predictions(num_problems: int) -> Predictions:
    """Predict prompts whose texts have `num_problems` solved problems each, at all thresholds."""
    model: Any = AutoModelForCausalLM.from_pretrained(SEEDLING, dtype=torch.float32).eval()
    words, draw = AutoTokenizer.from_pretrained(SEEDLING), random.Random(11)
    agents = [_rounds(model, words, draw, num_problems) for _ in range(NUM_AGENTS)]
    lengths = [one.num_tokens for rounds in agents for one in rounds]
    found = Predictions(num_prompts=len(lengths), num_tokens=statistics.mean(lengths))
    for threshold in THRESHOLDS:
        found.divergences[threshold] = []
        talks = [_talk(model, rounds, threshold, found) for rounds in agents]
        reused, computed = sum(of.reused for of in talks), sum(of.computed for of in talks)
        found.reused[threshold] = reused / (reused + computed)
    return found


def prediction_rows(found: Sequence[Predictions]) -> list[Row]:
    return [
        row
        for of in found
        for threshold, values in of.divergences.items()
        for row in _rows(of, threshold, values)
    ]


def _rows(of: Predictions, threshold: float, values: Sequence[float]) -> Iterator[Row]:
    what = f"{of.num_tokens:.0f} tokens of arithmetic: KL divergence, predicted at {threshold}"
    yield Row(
        what=f"{what}, all prompts",
        value=f"{sum(values) / of.num_prompts:.4f} nats per token, 0 where it is prefilled, "
        f"{100 * of.reused[threshold]:.0f} % of span KV reused",
    )
    share, few = f"{len(values)} of {of.num_prompts} predicted", len(values) < FEWEST
    if not values:
        yield Row(what=what, value=share)
        return
    mean = statistics.mean(values)
    yield Row(
        what=what,
        value=f"{mean:.4f} nats per token, worst prompt {max(values):.3f}, {share}",
        goal="" if few else "< 0.05",
        verdict="" if few else "met" if mean < 0.05 else "missed",
    )


def _talk(model: Any, rounds: Sequence[Round], threshold: float, found: Predictions) -> Tokens:
    foreseen, observations, tokens = HfPredictor(model), list[Observation](), Tokens()
    for one in rounds:
        told = foreseen.assemble(one.parts, observations, one.answer, max_entropy=threshold)
        tokens.count(one.parts, predicted=told is not None)
        if told is None:
            observations.append(foreseen.observed(one.parts))
        else:
            found.divergences[threshold].append(divergence(one.exact, told))
    return tokens


def _rounds(model: Any, words: Any, draw: random.Random, num_problems: int) -> list[Round]:
    own, placed = PromptSpan(token_ids=_text(words, draw, num_problems)), HfAssembler(model)
    rounds = []
    for _ in range(NUM_ROUNDS):
        heard = [
            PromptSpan(token_ids=_text(words, draw, num_problems), cache_key=str(i))
            for i in range(NUM_HEARD)
        ]
        problem = arithmetic.draw(draw, held_out=True)
        parts = [own, *heard, PromptSpan(token_ids=words.encode(problem.prompt))]
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
