"""Episodes: groups of agent sessions on the same question, finished with their rewards."""

import asyncio
import random
from collections.abc import Sequence

from openai import AsyncOpenAI

from coppice import AsyncRollouts, SessionResult
from coppice.session_results import AgentSession
from examples.agent_training.agent import solve
from examples.seedling import arithmetic
from examples.seedling.arithmetic import Problem
from examples.seedling.measure import held_out_problems

TERMS = range(2, 5)
HELD_OUT_SEED = 2025
# The policy calls the calculator by the end of a turn at an equals sign.
SAMPLING = {"max_tokens": 48, "stop": ["="], "include_stop_str_in_output": True}


def training_problem(rng: random.Random) -> Problem:
    while len((problem := arithmetic.draw(rng, held_out=False)).terms) not in TERMS:
        pass
    return problem


def held_out(count: int) -> list[Problem]:
    """The same held-out problems in every run."""
    drawn = held_out_problems(HELD_OUT_SEED, 16 * count)
    return [problem for problem in drawn if len(problem.terms) in TERMS][:count]


class Episodes:
    """Runs agents against the sessions of a server. `client` is only a pool of connections."""

    def __init__(self, rollouts: AsyncRollouts, client: AsyncOpenAI) -> None:
        self._rollouts = rollouts
        self._client = client

    async def run(self, problems: Sequence[Problem], n: int) -> list[list[SessionResult]]:
        """Finished sessions of n agents per problem."""
        return await asyncio.gather(*(self._group(problem, n) for problem in problems))

    async def _group(self, problem: Problem, n: int) -> list[SessionResult]:
        group = await self._rollouts.sessions.create(n, sampling=SAMPLING)
        return await asyncio.gather(*(self._episode(problem, each) for each in group.sessions))

    async def _episode(self, problem: Problem, session: AgentSession) -> SessionResult:
        agent = self._client.with_options(base_url=session.openai_url, api_key=session.key)
        answer = await solve(agent, problem.prompt.strip())
        reward = arithmetic.reward(problem.prompt, answer)
        return await self._rollouts.sessions.finish(session.id, reward=reward)
