"""Sessions that move between two real engines go on from their KV, with the tokens of no move."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from engine.types import Completion, SampleRequest
from service.sessions.received_kv import ReceivedKv
from tests.engine.seedling import BLOCK
from tests.engine.test_moved_kv import TOLERANCE, listen_finished, pair
from tests.service.sessions.agents import Agent
from tests.service.sessions.fleets import agents_of, get
from tests.serving import Served

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

__all__ = ["pair"]
NUM_SAMPLED = 60
GREEDY = {"max_tokens": NUM_SAMPLED, "temperature": 0.0, "ignore_eos": True}
PROMPT = [5 + i % 90 for i in range(70)]
NEW = [40 + i for i in range(11)]


@dataclass(frozen=True)
class Conversation:
    """Sampled tokens of each turn, and the logprobs of all of them."""

    turns: list[list[int]]
    logprobs: list[float]


async def turn(agent: Agent, prompt: list[int]) -> list[int]:
    """Sampled tokens of a call whose prompt is given as token ids."""
    [token_ids] = await samples(agent, prompt, 1)
    return token_ids


async def samples(agent: Agent, prompt: list[int], n: int) -> list[list[int]]:
    body = {"prompt": prompt, "n": n, "max_tokens": NUM_SAMPLED, "return_token_ids": True}
    answer = await agent.post("/v1/completions", body, headers={"x-api-key": agent.key})
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


async def send(a: Served, b: Served) -> None:
    """Move all sessions from one replica to another, as a drain does."""
    async with asyncio.timeout(30):
        await a.server._session_sender.send_all()
    assert (a.server.sessions.num_open, b.server.sessions.num_open) == (0, 1)


def forget(served: Served) -> None:
    """Forget the moved group, as a replica does that has been restarted after its drain."""
    store = served.server.sessions.store
    for group in store.groups():
        store._drop_group(group)


def received(served: Served) -> ReceivedKv | None:
    (session,) = served.server.sessions.open_sessions()
    return session.received_kv


@pytest_asyncio.fixture(loop_scope="module")
async def expected(pair: tuple[Served, Served]) -> AsyncIterator[Conversation]:
    """Conversation of a session that is not moved."""
    async with agents_of(pair[0], sampling=GREEDY) as [agent]:
        sampled = await conversation(agent, 3)
        logprobs = await logprobs_of(agent, pair[0])
        await pair[0].http.delete(f"/v1/sessions/{agent.id}")
    yield Conversation(sampled, logprobs)


async def logprobs_of(agent: Agent, served: Served) -> list[float]:
    """Logprobs of all sampled tokens of a session with one conversation."""
    tree = await get(served, f"/v1/sessions/{agent.id}/tree")
    [group] = tree["groups"]
    return [logprob for part in group["segments"] for logprob in part.get("logprobs", ())]


async def conversation(agent: Agent, num_turns: int) -> list[list[int]]:
    prompt, sampled = PROMPT, list[list[int]]()
    for _ in range(num_turns):
        sampled.append(await turn(agent, prompt))
        prompt = [*prompt, *sampled[-1], *NEW]
    return sampled


def computed(served: Served) -> list[int]:
    """Numbers of prompt tokens that a replica computes from now on, per request."""
    found = list[int]()

    def on_finished(sample: SampleRequest, done: Completion) -> None:
        found.append(len(sample.prompt_token_ids) - done.num_cached_tokens)

    listen_finished(served.server.engine, on_finished)
    return found


async def test_moved_session_computes_the_new_turn_and_at_most_a_block(
    pair: tuple[Served, Served], expected: Conversation
) -> None:
    a, b = pair
    async with agents_of(a, sampling=GREEDY) as [agent]:
        assert await turn(agent, PROMPT) == expected.turns[0]
        await send(a, b)
        assert received(b) is not None
        numbers = computed(b)
        prompt = [*PROMPT, *expected.turns[0], *NEW]
        assert await turn(agent, prompt) == expected.turns[1]
        assert b.server.kv_reuse.cache.num_bytes == 0
        assert await turn(agent, [*prompt, *expected.turns[1], *NEW]) == expected.turns[2]
        assert await logprobs_of(agent, b) == pytest.approx(expected.logprobs, abs=TOLERANCE)
        await b.http.delete(f"/v1/sessions/{agent.id}")
    assert len(numbers) == 2
    assert max(numbers) <= BLOCK + len(NEW)


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_session_that_moves_again_is_exported_with_its_received_kv(
    pair: tuple[Served, Served], expected: Conversation, is_loaded: bool
) -> None:
    """Also if no call has loaded it before."""
    a, b = pair
    prompt, texts = PROMPT, list(expected.turns)
    async with agents_of(a, sampling=GREEDY) as [agent]:
        assert await turn(agent, prompt) == texts[0]
        prompt = [*prompt, *texts.pop(0), *NEW]
        numbers: Any = [computed(a), computed(b)]
        await send(a, b)
        if is_loaded:
            assert await turn(agent, prompt) == texts[0]
            prompt = [*prompt, *texts.pop(0), *NEW]
        forget(a)
        await send(b, a)
        assert received(a) is not None
        assert b.server.kv_reuse.cache.num_bytes == 0
        assert await turn(agent, prompt) == texts[0]
        await a.http.delete(f"/v1/sessions/{agent.id}")
    assert max(sum(numbers, [])) <= BLOCK + len(NEW)


async def test_branch_and_main_conversation_load_what_they_share(
    pair: tuple[Served, Served], expected: Conversation
) -> None:
    """The call of a subagent comes first, and shares the first blocks only."""
    a, b = pair
    branch = [*PROMPT[: 2 * BLOCK], *NEW]
    async with agents_of(a, sampling=GREEDY) as [agent]:
        assert await turn(agent, PROMPT) == expected.turns[0]
        await send(a, b)
        numbers = computed(b)
        await turn(agent, branch)
        assert b.server.kv_reuse.cache.num_bytes > 0
        assert await turn(agent, [*PROMPT, *expected.turns[0], *NEW]) == expected.turns[1]
        assert b.server.kv_reuse.cache.num_bytes == 0
        await b.http.delete(f"/v1/sessions/{agent.id}")
    assert len(numbers) == 2
    assert max(numbers) <= BLOCK + len(NEW)


async def test_samples_of_one_call_share_the_received_kv(
    pair: tuple[Served, Served], expected: Conversation
) -> None:
    a, b = pair
    async with agents_of(a, sampling=GREEDY) as [agent]:
        assert await turn(agent, PROMPT) == expected.turns[0]
        await send(a, b)
        numbers = computed(b)
        prompt = [*PROMPT, *expected.turns[0], *NEW]
        assert await samples(agent, prompt, 3) == [expected.turns[1]] * 3
        assert b.server.kv_reuse.cache.num_bytes == 0
        await b.http.delete(f"/v1/sessions/{agent.id}")
    assert len(numbers) == 3
    assert max(numbers) <= BLOCK + len(NEW)


async def test_session_without_kv_computes_its_conversation_again(
    pair: tuple[Served, Served], expected: Conversation
) -> None:
    """The reference of the other tests, with the same tokens."""
    a, b = pair
    async with agents_of(a, sampling=GREEDY) as [agent]:
        assert await turn(agent, PROMPT) == expected.turns[0]
        await send(a, b)
        (session,) = b.server.sessions.open_sessions()
        session.release_received_kv()
        assert b.server.kv_reuse.cache.num_bytes == 0
        numbers = computed(b)
        prompt = [*PROMPT, *expected.turns[0], *NEW]
        assert await turn(agent, prompt) == expected.turns[1]
        await b.http.delete(f"/v1/sessions/{agent.id}")
    assert numbers == [len(prompt)]
