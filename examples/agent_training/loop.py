"""GRPO over the sessions of each group: sample, train, publish the weights."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import mean

import numpy as np

from coppice import AsyncRollouts, SessionResult
from coppice.train import SessionTree, session_trees
from examples.agent_training.episodes import Episodes, held_out, training_problem
from examples.grpo.history import Step
from examples.grpo.learner import Learner
from examples.grpo.stopwatch import Stopwatch

AGENTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStep(Step):
    """Statistics of one step. `tool_calls` is the mean number per held-out session.

    `tokens_by_turn` is what a trainer forwards if every turn is a row of its own.
    """

    tool_calls: float
    tokens_forwarded: int
    tokens_by_turn: int


class Loop:
    def __init__(
        self,
        rollouts: AsyncRollouts,
        episodes: Episodes,
        learner: Learner,
        *,
        seed: int,
        groups: int,
        num_held_out: int,
    ) -> None:
        self._rollouts = rollouts
        self._episodes = episodes
        self._learner = learner
        self._rng = random.Random(seed)
        self._num_groups = groups
        self._held_out = held_out(num_held_out)

    async def steps(self, num_steps: int) -> AsyncIterator[AgentStep]:
        for number in range(1, num_steps + 1):
            yield await self._step(number)

    async def _step(self, number: int) -> AgentStep:
        watch = Stopwatch()
        problems = [training_problem(self._rng) for _ in range(self._num_groups)]
        with watch("samples"):
            groups, tested = await asyncio.gather(
                self._episodes.run(problems, AGENTS), self._episodes.run(self._held_out, 1)
            )
        with watch("gradients"):
            trees = list(chain.from_iterable(map(session_trees, groups)))
            await asyncio.to_thread(self._train, trees)
        with watch("weights"):
            await self._rollouts.publish_weights(
                f"step-{number}", self._learner.weights(), mode="keep", delta=True
            )
        sessions, unseen = list(chain(*groups)), list(chain(*tested))
        lengths = [session.usage.num_sampled_tokens for session in sessions]
        return AgentStep(
            number=number,
            held_out_reward=_mean_reward(unseen),
            training_reward=_mean_reward(sessions),
            mean_tokens=mean(lengths),
            p95_tokens=float(np.quantile(lengths, 0.95)),
            versions_behind=0.0,  # a step's sessions end before its weight update
            seconds=watch.seconds,
            tool_calls=mean(len(session.turns) - 1 for session in unseen),
            tokens_forwarded=sum(len(each.tree.prompt) + each.tree.num_tokens for each in trees),
            tokens_by_turn=sum(
                session.usage.num_prompt_tokens + session.usage.num_sampled_tokens
                for session in sessions
            ),
        )

    def _train(self, trees: Sequence[SessionTree]) -> None:
        self._learner.backward([each.tree for each in trees], [each.advantages for each in trees])
        self._learner.update()


def _mean_reward(sessions: Sequence[SessionResult]) -> float:
    return mean(session.reward or 0.0 for session in sessions)
