"""KV of moved sessions is kept for their next calls, in bounded memory, until it is not needed."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.kv_reuse.prompt_sections import Scope
from service.kv_reuse.span_cache import CacheEntry, EntryKey, SpanCache
from service.rollouts.fairness import MICROSECONDS
from service.sessions.received_kv import ReceivedKv
from tests.fake_engine import BLOCK_SIZE, FakeEngine
from tests.service.cluster.test_moved_kv import pair
from tests.service.cluster.test_moves import engine_of
from tests.service.sessions.agents import Agent
from tests.service.sessions.fleets import agents_of, drain, get
from tests.service.test_rollouts import running_samples
from tests.serving import Served

pytestmark = pytest.mark.slow

PROMPT = [1 + i % 200 for i in range(70)]
NUM_TOKENS = 3
END = (len(PROMPT) + NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE


async def turn(served: Served, agent: Agent, prompt: list[int]) -> list[int]:
    """Tokens of a call; the engine of `served` samples them."""
    body = {"prompt": prompt, "return_token_ids": True}
    calling = asyncio.create_task(
        agent.post("/v1/completions", body, headers={"x-api-key": agent.key})
    )
    await running_samples(served, 1)
    engine_of(served).step(NUM_TOKENS)
    answer = await calling
    assert answer.status_code == 200, answer.text
    token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return token_ids


@asynccontextmanager
async def moved(
    tmp_path: Path, fields: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Served, Served, Agent, list[int]]]:
    """A session with one turn that was moved, and the prompt of its next call."""
    async with pair(tmp_path, **options) as (a, b), agents_of(a, **(fields or {})) as [agent]:
        sampled = await turn(a, agent, PROMPT)
        await drain(a)
        yield a, b, agent, [*PROMPT, *sampled, 9, 9, 9]


def received(served: Served) -> ReceivedKv | None:
    (session,) = served.server.sessions.open_sessions()
    return session.received_kv


def outcomes(served: Served) -> dict[str, float]:
    (family,) = served.server.metrics.sessions.moved_kv.collect()
    return {
        each.labels["outcome"]: each.value
        for each in family.samples
        if each.name.endswith("_total") and each.value
    }


def num_cached(engine: FakeEngine) -> int:
    (running,) = engine.running.values()
    return running.num_cached


def loaded_tokens(served: Served) -> int:
    """Tokens that the last request of a replica is to load."""
    load = engine_of(served).submitted[-1].load
    return 0 if load is None else sum(piece.num_tokens for piece in load.pieces)


@pytest.mark.parametrize("one_host", [True, False])
async def test_next_call_loads_the_conversation_once(tmp_path: Path, one_host: bool) -> None:
    async with moved(tmp_path, one_host=one_host) as (a, b, agent, prompt):
        assert outcomes(b) == {"received": 1} and outcomes(a) == {}
        kv = received(b)
        assert kv is not None and kv.token_ids.tolist() == prompt[:END]
        assert b.server.kv_reuse.cache.num_spans == 1
        status = a.server.prompt_kv.status()
        assert (status.num_handles, status.leased_bytes, status.reserved_bytes) == (0, 0, 0)
        sampled = await turn(b, agent, prompt)
        assert loaded_tokens(b) == END
        assert b.server.kv_reuse.cache.num_bytes == 0
        await turn(b, agent, [*prompt, *sampled, 9])
        load = engine_of(b).submitted[-1].load
        assert load is not None and (load.chain, load.pieces) == (kv.chain, ())


async def test_branch_loads_the_blocks_that_it_shares(tmp_path: Path) -> None:
    """The rest is kept for the main conversation, whose next call loads it."""
    async with moved(tmp_path) as (_, b, agent, prompt):
        await turn(b, agent, [*prompt[: BLOCK_SIZE + 1], 250, 251])
        assert loaded_tokens(b) == BLOCK_SIZE
        branch = engine_of(b).submitted[-1].load
        await turn(b, agent, prompt)
        main = engine_of(b).submitted[-1].load
        assert branch is not None and main is not None and branch.chain == main.chain
        assert loaded_tokens(b) == END
        assert b.server.kv_reuse.cache.num_bytes == 0


async def test_aborted_call_leaves_the_kv_for_the_next_one(tmp_path: Path) -> None:
    async with moved(tmp_path) as (_, b, agent, prompt):
        body = {"prompt": prompt, "return_token_ids": True}
        calling = asyncio.create_task(
            agent.post("/v1/completions", body, headers={"x-api-key": agent.key})
        )
        await running_samples(b, 1)
        engine_of(b).step(1)
        calling.cancel()
        await running_samples(b, 0)
        await b.server.sessions.open_sessions()[0].wait_until_idle()
        await turn(b, agent, prompt)
        assert loaded_tokens(b) == END
        assert b.server.kv_reuse.cache.num_bytes == 0


async def test_other_conversation_is_prefilled(tmp_path: Path) -> None:
    async with moved(tmp_path) as (_, b, agent, prompt):
        await turn(b, agent, [250, *prompt])
        assert engine_of(b).submitted[-1].load is None
        assert received(b) is not None


@pytest.mark.parametrize("end", ["DELETE", "finish"])
async def test_kv_is_released_when_the_session_ends(tmp_path: Path, end: str) -> None:
    async with moved(tmp_path) as (_, b, agent, _):
        assert b.server.kv_reuse.cache.num_bytes
        path = f"/v1/sessions/{agent.id}"
        if end == "DELETE":
            await get(b, path, method="DELETE")
        else:
            await get(b, f"{path}/finish", method="POST", json={})
        assert b.server.kv_reuse.cache.num_bytes == 0


async def test_kv_is_released_when_the_session_expires(tmp_path: Path) -> None:
    async with moved(tmp_path) as (_, b, agent, _):
        (session,) = b.server.sessions.open_sessions()
        session.expires_at = 0.0
        b.server.sessions.check_due()
        await session.ended.wait()
        assert b.server.kv_reuse.cache.num_bytes == 0


async def test_kv_of_earlier_weights_is_released_and_not_loaded(tmp_path: Path) -> None:
    async with moved(tmp_path) as (_, b, agent, prompt):
        b.server.kv_reuse.cache._epoch = lambda: 1
        b.server.sessions.check_due()
        assert b.server.kv_reuse.cache.num_bytes == 0
        await turn(b, agent, prompt)
        assert engine_of(b).submitted[-1].load is None


@contextmanager
def full(cache: SpanCache) -> Iterator[None]:
    """Context manager in which the arena has no room, as other requests use all of it."""
    held, key = list[CacheEntry](), EntryKey(Scope("", None), 0, "", b"")
    while (entry := cache.reserve(END, key)) is not None:
        held.append(entry)
    try:
        yield
    finally:
        for entry in held:
            cache.unpin(entry, settled=True)


async def test_kv_gives_way_to_other_spans(tmp_path: Path) -> None:
    async with moved(tmp_path) as (_, b, agent, prompt):
        cache = b.server.kv_reuse.cache
        with full(cache):
            assert cache.num_spans == 0
            await turn(b, agent, prompt)
        assert engine_of(b).submitted[-1].load is None
        assert cache.num_bytes == 0


async def test_session_moves_without_its_kv_if_the_arena_is_full(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b), agents_of(a) as [agent]:
        await turn(a, agent, PROMPT)
        with full(b.server.kv_reuse.cache):
            await drain(a)
        assert outcomes(b) == {"no_room": 1}
        assert received(b) is None and b.server.kv_reuse.cache.num_bytes == 0


@pytest.mark.parametrize(
    ("options", "outcome", "counted"),
    [
        ({"move_kv_bytes_per_second": 0}, "disabled", "a"),
        ({"move_kv_bytes_per_second": 1}, "too_large", "a"),
        ({"receiver": {"spans_bytes": 0}}, "disabled", "b"),
    ],
)
async def test_session_without_its_kv_moves_and_is_prefilled(
    tmp_path: Path, options: dict[str, Any], outcome: str, counted: str
) -> None:
    async with moved(tmp_path, **options) as (a, b, agent, prompt):
        assert outcomes({"a": a, "b": b}[counted]) == {outcome: 1}
        await turn(b, agent, prompt)
        assert engine_of(b).submitted[-1].load is None


async def test_sessions_with_kept_kv_are_prefilled(tmp_path: Path) -> None:
    async with moved(tmp_path, {"keep_kv": {}}) as (a, b, _, _):
        assert outcomes(a) == {"disabled": 1} and received(b) is None


async def test_no_memory_is_left_if_the_session_is_refused(tmp_path: Path) -> None:
    """The sessions stay on the sender, which loses nothing."""
    async with pair(tmp_path) as (a, b), agents_of(a) as [agent]:
        await turn(a, agent, PROMPT)
        b.server.sessions.store._max_bytes = 0
        await a.server.drain(1.0)
        assert outcomes(b)["received"]
        assert b.server.kv_reuse.cache.num_bytes == 0
        status = a.server.prompt_kv.status()
        assert (status.num_handles, status.leased_bytes, status.reserved_bytes) == (0, 0, 0)
        answer = await get(a, f"/v1/sessions/{agent.id}")
        assert answer["usage"]["num_sampled_tokens"] == NUM_TOKENS


async def test_export_has_the_priority_of_a_call_that_arrives_then(tmp_path: Path) -> None:
    """Not behind all requests that arrive later."""
    async with pair(tmp_path) as (a, _), agents_of(a, priority=2**31 - 1) as [agent]:
        await turn(a, agent, PROMPT)
        [call] = engine_of(a).submitted
        await drain(a)
        [export] = [each for each in engine_of(a).submitted if each.export is not None]
        assert 0 < export.priority - call.priority < 60 * MICROSECONDS
