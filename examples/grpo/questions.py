"""Arithmetic questions that the GRPO example trains on, and rewards of the responses."""

import random
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from coppice import GroupRequest, Prompt, Sample
from examples.seedling import arithmetic
from examples.seedling.measure import held_out_problems

HELD_OUT_SEED = 2024


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    text: str
    token_ids: list[int]

    def asked(self, n: int) -> GroupRequest:
        return GroupRequest(prompt=Prompt(token_ids=self.token_ids), n=n)


class Questions:
    """Seeded endless source of training questions, and a fixed set of held-out questions."""

    def __init__(self, words: PreTrainedTokenizerFast, *, seed: int, num_held_out: int) -> None:
        self._words = words
        self._rng = random.Random(seed)
        self.held_out = [self._of(p) for p in held_out_problems(HELD_OUT_SEED, num_held_out)]

    def draw(self, count: int) -> list[Question]:
        return [self._of(arithmetic.draw(self._rng, held_out=False)) for _ in range(count)]

    def reward(self, question: Question, sample: Sample) -> float:
        """Reward of a sample: 1 if its answer is right, 0 if it is wrong or was cut off."""
        if sample.finish_reason != "stop":
            return 0.0
        response = self._words.decode(sample.token_ids.tolist(), skip_special_tokens=True)
        return arithmetic.reward(question.text, response)

    def _of(self, problem: arithmetic.Problem) -> Question:
        return Question(text=problem.prompt, token_ids=self._words.encode(problem.prompt))
