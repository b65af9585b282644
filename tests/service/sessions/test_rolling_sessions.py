"""Agents work while all but one of the replicas drain, one after the other: nothing is lost."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from coppice import AsyncRollouts
from coppice.session_results import SessionResult
from tests.service.sessions.agents import Agent
from tests.service.sessions.fleets import agents_of, drain, replicas
from tests.serving import Served

pytestmark = pytest.mark.slow

NUM_AGENTS, NUM_TURNS = 8, 6


async def step_forever(served: list[Served]) -> None:
    """Let the samples of all engines advance."""
    while True:
        await asyncio.sleep(0.002)
        for each in served:
            engine: Any = each.server.engine
            engine.step(1)


async def respond(agent: Agent, messages: list[Any]) -> str:
    """Response to a conversation; the request is repeated while the session moves."""
    body, headers = {"messages": messages}, {"x-api-key": agent.key}
    while True:
        answer = await agent.post("/v1/chat/completions", body, headers=headers)
        if answer.status_code != 503:
            break
        await asyncio.sleep(0.02)
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


async def episode(agent: Agent, draws: random.Random) -> None:
    messages: list[Any] = []
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"turn {turn} of {agent.id[-4:]}"})
        messages.append({"role": "assistant", "content": await respond(agent, messages)})
        await asyncio.sleep(draws.uniform(0, 0.15))


async def read(served: Served, group: str) -> list[SessionResult]:
    async with AsyncRollouts(served.url, timeout=60) as client:
        return [session async for session in client.sessions.stream(group)]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
async def test_episodes_survive_a_rolling_update(tmp_path: Path, seed: int) -> None:
    draws = random.Random(seed)
    async with (
        replicas(tmp_path, 3, instant=False) as served,
        agents_of(served[0], n=NUM_AGENTS, group="g") as agents,
        AsyncRollouts(served[2].url, timeout=60) as client,
    ):
        stepping = asyncio.create_task(step_forever(served))
        reading = asyncio.create_task(read(served[2], f"{agents[0].id.partition('.')[0]}.g"))

        async def run(agent: Agent, reward: float) -> None:
            await episode(agent, draws)
            result = await client.sessions.finish(agent.id, reward=reward)
            assert len(result.turns) == NUM_TURNS

        async with asyncio.TaskGroup() as tasks:
            for index, agent in enumerate(agents):
                tasks.create_task(run(agent, float(index)))
            for leaving in served[:2]:
                await asyncio.sleep(0.2)
                await drain(leaving)
        found = await reading
        stepping.cancel()
    assert {(each.id, each.reward) for each in found} == {
        (agent.id, float(index)) for index, agent in enumerate(agents)
    }
    assert len(found) == NUM_AGENTS
    for session in found:
        reasons = [turn.reason for turn in session.turns]
        assert reasons == ["new_conversation"] + ["extended"] * (NUM_TURNS - 1)
        assert session.usage.num_sampled_tokens == 3 * NUM_TURNS
