"""Benchmark: how splicing changes the answers of a small model trained on multi-agent prompts.

The model is a seedling (small test model) trained on other agents' messages.

Measured are the accuracy of its answers (examples/seedling/multi_agent_task.py), and the divergence
of the distributions at the right answer's tokens.

An assembly mode maps a prompt's parts to a cache of all its tokens but the last, and the number of
spliced tokens. It is called turn by turn, in the same order every time, so it may keep state.
Answers are generated greedily and at temperature 1, with the same noise in every mode, so that
modes differ by their distributions and not by noise. The probability of the right answer as written
is the limit of sampled accuracy, except for right answers in other words.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench.harness.cached_generation import CachedPrompt, generate, log_probabilities
from bench.harness.hf_splice import HfAssembler, divergence
from coppice.wire.rollouts import PromptSpan
from examples.seedling import multi_agent_task
from service.kv.spans.prompt_template import joined
from service.kv.spans.spliced_prompt import token_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledPrompt:
    cache: DynamicCache
    num_placed: int


Assembly = Callable[[Sequence[PromptSpan]], AssembledPrompt]
SHAPES = (
    multi_agent_task.Shape(num_peers=2, own=80, steps=7),
    multi_agent_task.Shape(num_peers=3, own=250, steps=8),
    multi_agent_task.Shape(num_peers=4, own=640, steps=9),
)
NUM_TURNS, SAMPLES, MAX_TOKENS, SEED = 256, 1, 72, 7
PREFILLED = "prefilled"


@dataclass(slots=True, kw_only=True)
class TurnScores:
    """Measurements of agents' prompts of one shape, one entry per prompt.

    `greedy` and `sampled` are fractions of right answers.
    """

    tokens: list[int] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)
    shares: dict[str, list[float]] = field(default_factory=dict)
    """Spliced fraction of the prompt's tokens."""
    divergences: dict[str, list[float]] = field(default_factory=dict)
    chances: dict[str, list[float]] = field(default_factory=dict)
    """Probabilities of the right answer as written, at temperature 1."""
    greedy: dict[str, list[float]] = field(default_factory=dict)
    sampled: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    parts: list[PromptSpan]
    answer: list[int]
    question: multi_agent_task.Question


class AgentEvaluation:
    """Evaluates a model's answers to agents' prompts under several ways to compute prompt KV."""

    def __init__(self, model: Any, words: Any) -> None:
        self.model, self._words = model, words

    @classmethod
    def of(cls, folder: str) -> "AgentEvaluation":
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(model.eval(), AutoTokenizer.from_pretrained(folder))

    def asked(self, shape: multi_agent_task.Shape, num_turns: int) -> list[Case]:
        draw = random.Random(SEED)
        return [
            self._asked(multi_agent_task.draw(draw, shape, held_out=True)) for _ in range(num_turns)
        ]

    def scores(self, asked: Sequence[Case], ways: Mapping[str, Assembly]) -> TurnScores:
        """Score the answers in all modes, the first of which (prefilled) is the reference."""
        scores = TurnScores()
        for number, one in enumerate(asked):
            self._score_turn(one, ways, self._noise(number), scores)
        return scores

    def _score_turn(
        self, one: Case, ways: Mapping[str, Assembly], noise: torch.Tensor, scores: TurnScores
    ) -> None:
        prompt = joined(one.parts)
        scores.tokens.append(len(prompt))
        exact, drafts = None, [one.answer] * len(noise)
        for name, way in ways.items():
            put = way(one.parts)
            prompted = CachedPrompt(cache=put.cache, last=prompt[-1])
            logs = log_probabilities(self.model, prompted, one.answer)[:-1]
            answers = [self._answer(prompted, *drawn) for drawn in zip(noise, drafts, strict=True)]
            if exact is None:
                # With the same noise most answers of the other modes are equal.
                exact, drafts = logs, answers
                scores.surprises.append(_surprise(logs, one.answer))
            rewards = [self._reward(one.question, answer) for answer in answers]
            scores.shares.setdefault(name, []).append(put.num_placed / len(prompt))
            scores.divergences.setdefault(name, []).append(divergence(exact, logs))
            scores.chances.setdefault(name, []).append(_chance(logs, one.answer))
            scores.greedy.setdefault(name, []).append(rewards[0])
            scores.sampled.setdefault(name, []).append(statistics.mean(rewards[1:]))

    def _answer(
        self, prompted: CachedPrompt, noise: torch.Tensor, draft: Sequence[int]
    ) -> list[int]:
        end = self._words.eos_token_id
        return generate(self.model, prompted, noise, draft=draft, end=end)

    def _reward(self, question: multi_agent_task.Question, answer: Sequence[int]) -> float:
        text = self._words.decode(answer, skip_special_tokens=True)
        return question.reward(text) if answer[-1] == self._words.eos_token_id else 0.0

    def _noise(self, number: int) -> torch.Tensor:
        """Noise [1 + SAMPLES, T, V] on logits: zeros for greedy answers, then Gumbel noise."""
        chance = torch.Generator().manual_seed(number)
        shape = (SAMPLES, MAX_TOKENS, self.model.config.vocab_size)
        gumbel = -torch.empty(shape).exponential_(generator=chance).log()
        return torch.cat([torch.zeros(1, *shape[1:]), gumbel])

    def _asked(self, turn: multi_agent_task.Turn) -> Case:
        encode = self._words.encode
        return Case(
            parts=[
                PromptSpan(token_ids=encode(turn.own)),
                PromptSpan(token_ids=encode(turn.told), cache_key="question"),
                *(
                    PromptSpan(token_ids=encode(said), cache_key=str(i))
                    for i, said in enumerate(turn.said)
                ),
                PromptSpan(token_ids=encode(turn.ask)),
            ],
            answer=[*encode(turn.question.written_out), self._words.eos_token_id],
            question=turn.question,
        )


def evaluate_agents(folder: str, recompute_tokens: Sequence[int], block: int) -> list[TurnScores]:
    """Evaluate a model on agents' prompts of every shape, prefilled and spliced."""
    hearing = AgentEvaluation.of(folder)
    return [
        hearing.scores(
            hearing.asked(shape, NUM_TURNS), assembly_modes(hearing.model, recompute_tokens, block)
        )
        for shape in SHAPES
    ]


def assembly_modes(model: Any, recompute_tokens: Sequence[int], block: int) -> dict[str, Assembly]:
    """Ways to compute the KV of agents' prompts: prefilled, or spliced from cached spans."""
    kept = HfAssembler(model, block=block)

    def computed(parts: Sequence[PromptSpan]) -> AssembledPrompt:
        return AssembledPrompt(cache=kept.computed_cache(parts), num_placed=0)

    def placed(first: int, parts: Sequence[PromptSpan]) -> AssembledPrompt:
        runs = token_runs(parts, recompute_tokens=first, block=block)
        return AssembledPrompt(
            cache=kept.cache(parts, recompute_tokens=first),
            num_placed=sum(run.num_tokens for run in runs if run.span is not None),
        )

    ways: dict[str, Assembly] = {PREFILLED: computed}
    return ways | {
        f"spliced ({k} recomputed per span)": partial(placed, k) for k in recompute_tokens
    }


def _surprise(logs: torch.Tensor, answer: Sequence[int]) -> float:
    return float(-logs.gather(1, torch.tensor(answer)[:, None]).mean())


def _chance(logs: torch.Tensor, answer: Sequence[int]) -> float:
    return float(logs.gather(1, torch.tensor(answer)[:, None]).sum().exp())
