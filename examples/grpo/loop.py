"""GRPO training loop that trains on one batch while the server samples the next one.

Each step publishes its weights while samples are running, so most samples come from two weights
versions. The loss accounts for this with the sampling logprob of each token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import mean

import numpy as np
import torch

from coppice import Group, Pending, RolloutResult, Rollouts, Sample
from coppice.train import TrainingGroup
from examples.grpo.history import Step
from examples.grpo.learner import Learner
from examples.grpo.questions import Question, Questions
from examples.grpo.stopwatch import Stopwatch

SAMPLES = 8
HELD_OUT_SAMPLES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Batch of a training step: the training questions, and the pending rollout that samples them.

    The rollout's groups after those of the training questions are for the held-out questions.
    """

    training: list[Question]
    pending: Pending


class Loop:
    def __init__(
        self,
        rollouts: Rollouts,
        learner: Learner,
        questions: Questions,
        *,
        groups: int,
        max_tokens: int,
    ) -> None:
        self._rollouts = rollouts
        self._learner = learner
        self._questions = questions
        self._num_groups = groups
        self._max_tokens = max_tokens

    def steps(self, num_steps: int) -> Iterator[Step]:
        following = self._submit()
        for number in range(1, num_steps + 1):
            watch = Stopwatch()
            batch = following
            with watch("samples"):
                result = batch.pending.wait()
            if number < num_steps:
                following = self._submit()
            yield self._step(number, batch, result, watch)

    def _submit(self) -> Batch:
        training = self._questions.draw(self._num_groups)
        asked = [question.asked(SAMPLES) for question in training]
        asked += [question.asked(HELD_OUT_SAMPLES) for question in self._questions.held_out]
        pending = self._rollouts.submit(asked, max_tokens=self._max_tokens)
        return Batch(training=training, pending=pending)

    def _step(self, number: int, batch: Batch, result: RolloutResult, watch: Stopwatch) -> Step:
        answers = result.groups[: len(batch.training)]
        with watch("rewards"):
            rewards = self._rewards(batch.training, answers)
            held_out = self._rewards(self._questions.held_out, result.groups[len(answers) :])
        with watch("gradients"):
            self._learner.gradients(
                [
                    TrainingGroup.of(question.token_ids, group)
                    for question, group in zip(batch.training, answers, strict=True)
                ],
                [torch.tensor(of_group) for of_group in rewards],
            )
            self._learner.update()
        with watch("weights"):
            self._rollouts.publish_weights(
                _version(number), self._learner.weights(), mode="keep", delta=True
            )
        samples = [sample for group in answers for sample in group.samples]
        lengths = [len(sample.token_ids) for sample in samples]
        return Step(
            number=number,
            held_out_reward=mean(chain.from_iterable(held_out)),
            training_reward=mean(chain.from_iterable(rewards)),
            mean_tokens=mean(lengths),
            p95_tokens=float(np.quantile(lengths, 0.95)),
            versions_behind=_versions_behind(number, samples),
            seconds=watch.seconds,
        )

    def _rewards(self, questions: Sequence[Question], groups: Sequence[Group]) -> list[list[float]]:
        return [
            [self._questions.reward(question, sample) for sample in group.samples]
            for question, group in zip(questions, groups, strict=True)
        ]


def _versions_behind(number: int, samples: Sequence[Sample]) -> float:
    made_by = (version for sample in samples for version in sample.token_versions())
    return mean(number - 1 - _updates(version) for version in made_by)


def _version(updates: int) -> str:
    return f"step-{updates}"


def _updates(version: str) -> int:
    """Number of weight updates in a version label such as "step-3"; 0 for the initial version."""
    return int(version.removeprefix("step-")) if version.startswith("step-") else 0
