"""Sessions whose KV cannot be moved are moved without it, and no memory is left anywhere."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coppice.wire.session_moves import MovedSessionKv
from service.cluster.registry import Replica
from service.prompt_kv.exports import Export
from tests.cluster import sees
from tests.fake_engine import BLOCK_SIZE
from tests.service.cluster.test_moved_kv import NUM_BYTES, ExportingEngine, pair
from tests.service.cluster.test_moves import engine_of
from tests.service.sessions.agents import Agent
from tests.service.sessions.fleets import agents_of, drain, get
from tests.service.sessions.test_moved_session_kv import (
    END,
    PROMPT,
    loaded_tokens,
    outcomes,
    received,
    turn,
)
from tests.service.sessions.test_session_move_faults import PATH, state_of
from tests.serving import Served

pytestmark = pytest.mark.slow

SOURCE_ID = "c" * 12
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: %d\r\n\r\n"


async def is_released_by(receiver: Served) -> None:
    async with asyncio.timeout(30):
        while receiver.server.kv_reuse.cache.num_bytes:
            await asyncio.sleep(0.001)


async def is_released(a: Served, b: Served) -> None:
    """Wait until no KV of the move is left."""
    await is_released_by(b)
    b.server.kv_reuse.cache.check()
    status = a.server.prompt_kv.status()
    assert (status.num_handles, status.leased_bytes, status.reserved_bytes) == (0, 0, 0)


@asynccontextmanager
async def exported(
    tmp_path: Path, **options: Any
) -> AsyncIterator[tuple[Served, Served, Agent, Any, MovedSessionKv]]:
    """A session with one turn, the request that moves it, and its exported KV."""
    async with pair(tmp_path, **options) as (a, b), agents_of(a) as [agent]:
        async with exported_by(a, agent) as (state, kv):
            yield a, b, agent, state, kv
        await is_released(a, b)


@asynccontextmanager
async def exported_by(served: Served, agent: Agent) -> AsyncIterator[tuple[Any, MovedSessionKv]]:
    await turn(served, agent, PROMPT)
    session = served.server.sessions.get(agent.id, owner="local")
    await session.wait_until_idle()
    async with served.server._session_sender._kv.exported([session]) as found:
        kv = found[agent.id]
        state = await state_of(served, agent)
        state["sessions"][0]["kv"] = kv.model_dump(mode="json")
        yield state, kv


@asynccontextmanager
async def exported_session(served: Served) -> AsyncIterator[tuple[Any, MovedSessionKv]]:
    async with agents_of(served) as [agent], exported_by(served, agent) as found:
        yield found


async def receive(served: Served, state: Any) -> int:
    answer = await served.http.post(PATH, json=state, timeout=30.0)
    return answer.status_code


async def test_exported_kv_is_received(tmp_path: Path) -> None:
    """The request of the other tests, unchanged."""
    async with exported(tmp_path) as (a, b, agent, state, _):
        [request] = [each for each in engine_of(a).submitted if each.export is not None]
        session = a.server.sessions.get(agent.id, owner="local")
        assert (request.session_id, request.cache_salt) == (agent.id, session.cache_salt)
        assert len(request.prompt_token_ids) == END + 1
        assert await receive(b, state) == 201
        assert outcomes(b) == {"received": 1}
        await get(b, f"/v1/sessions/{agent.id}", method="DELETE")


async def test_conversation_that_fills_the_context_is_exported_in_a_prompt_that_fits(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as (a, _), agents_of(a) as [agent]:
        await turn(a, agent, PROMPT)
        engine = engine_of(a)
        engine.max_context_tokens = END + 1
        session = a.server.sessions.get(agent.id, owner="local")
        await session.wait_until_idle()
        async with a.server._session_sender._kv.exported([session]) as found:
            assert found[agent.id].file.num_tokens == END - BLOCK_SIZE
        assert len(engine.submitted[-1].prompt_token_ids) < END + 1


async def test_changed_bytes_are_not_loaded(tmp_path: Path) -> None:
    async with exported(tmp_path) as (a, b, _, state, kv):
        arena = a.server.prompt_kv.arena
        assert arena is not None
        last = kv.file.offset + kv.file.num_bytes - 1
        arena.view[last] ^= 1
        assert await receive(b, state) == 201
        assert outcomes(b) == {"failed": 1} and received(b) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"start": 32},
        {"num_tokens": 0},
        {"num_tokens": END - 1},
        {"num_tokens": END + 32},
        {"num_tokens": 2**20},
        {"num_bytes": 0},
        {"offset": 0},
        {"offset": 2**53 - 1},
    ],
)
async def test_file_that_does_not_fit_the_session_is_not_loaded(
    tmp_path: Path, fields: dict[str, int]
) -> None:
    async with exported(tmp_path) as (_, b, _, state, _):
        state["sessions"][0]["kv"]["file"].update(fields)
        assert await receive(b, state) == 201
        assert outcomes(b) == {"failed": 1} and received(b) is None


async def test_kv_of_other_tokens_is_not_loaded(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, b, _, state, _):
        state["sessions"][0]["segments"][0]["segment"]["token_ids"][0] += 1
        assert await receive(b, state) == 201
        assert outcomes(b) == {"failed": 1} and received(b) is None


async def test_kv_of_an_unknown_segment_is_not_loaded(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, b, _, state, _):
        state["sessions"][0]["kv"]["segment"] = "7"
        assert await receive(b, state) == 201
        assert outcomes(b) == {"failed": 1}


async def test_kv_of_an_ended_session_is_ignored(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, b, _, state, _):
        ended = {"state": "cancelled", "end_reason": "cancelled", "sequence": 1}
        state["sessions"][0].update(ended)
        assert await receive(b, state) == 201
        assert outcomes(b) == {}


@asynccontextmanager
async def source(served: Served, num_bytes: int) -> AsyncIterator[asyncio.Event]:
    """Replica in the registry that sends half of a file, and dies when the event is set."""
    dies = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD % num_bytes + b"\0" * (num_bytes // 2))
        await writer.drain()
        await dies.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    entry = Replica(id=SOURCE_ID, url=url, state="draining", version="v0", sequence=0)
    await served.server.cluster.registry.beat(entry, ttl_seconds=60)
    await sees(served, 3)
    async with server:
        try:
            yield dies
        finally:
            dies.set()


async def has_reserved(served: Served, number: int) -> None:
    """Wait until a replica has reserved memory for the KV of so many sessions."""
    async with asyncio.timeout(30):
        while served.server.kv_reuse.cache.num_bytes < number * END * NUM_BYTES:
            await asyncio.sleep(0.001)


async def test_session_is_received_if_its_source_dies(tmp_path: Path) -> None:
    async with exported(tmp_path, one_host=False) as (_, b, _, state, kv):
        state["source"] = SOURCE_ID
        async with source(b, kv.file.num_bytes) as dies:
            dies.set()
            assert await receive(b, state) == 201
        assert outcomes(b) == {"failed": 1} and received(b) is None


async def test_session_is_received_if_its_source_stalls(tmp_path: Path) -> None:
    async with exported(tmp_path, one_host=False) as (_, b, _, state, kv):
        state["source"] = SOURCE_ID
        state["sessions"][0]["kv"]["seconds"] = 0.5
        async with source(b, kv.file.num_bytes):
            assert await receive(b, state) == 201
        assert outcomes(b) == {"timeout": 1} and received(b) is None


async def test_memory_is_released_if_the_sender_gives_up(tmp_path: Path) -> None:
    """It is freed once the thread that reads the file has ended."""
    async with exported(tmp_path, one_host=False) as (_, b, _, state, kv):
        state["source"] = SOURCE_ID
        async with source(b, kv.file.num_bytes) as dies:
            receiving = asyncio.create_task(receive(b, state))
            await has_reserved(b, 1)
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            dies.set()
            await is_released_by(b)
        assert b.server.sessions.num_open == 0


async def test_fetches_that_wait_for_others_have_no_memory(tmp_path: Path) -> None:
    """Otherwise they would displace entries of the span cache for nothing."""
    async with pair(tmp_path, one_host=False) as (a, b), AsyncExitStack() as stack:
        found = [await stack.enter_async_context(exported_session(a)) for _ in range(3)]
        *first, last = [state for state, _ in found]
        for state in (*first, last):
            state["source"] = SOURCE_ID
        last["sessions"][0]["kv"]["seconds"] = 0.2
        async with source(b, found[0][1].file.num_bytes) as dies:
            receiving = asyncio.gather(*(receive(b, state) for state in first))
            await has_reserved(b, 2)
            reserved = b.server.kv_reuse.cache.num_bytes
            assert await receive(b, last) == 201
            assert outcomes(b) == {"timeout": 1}
            assert b.server.kv_reuse.cache.num_bytes == reserved
            dies.set()
            assert await receiving == [201, 201]
        assert outcomes(b) == {"timeout": 1, "failed": 2}
        await is_released_by(b)


async def test_kv_is_not_loaded_if_weights_are_activated_meanwhile(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, b, _, state, _):
        engine, cache = engine_of(b), b.server.kv_reuse.cache
        assert isinstance(engine, ExportingEngine)

        async def activate() -> None:
            cache._epoch = lambda: 1

        engine.on_added = activate
        assert await receive(b, state) == 201
        assert outcomes(b) == {"other_version": 1} and received(b) is None


async def test_kv_of_other_weights_is_not_loaded(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, b, _, state, _):
        b.server._session_kv_importer._version = lambda: "v7"
        assert await receive(b, state) == 201
        assert outcomes(b) == {"failed": 1} and received(b) is None


async def test_kv_is_not_fetched_during_an_activation(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, b, _, state, _):
        b.server._session_kv_importer._version = lambda: None
        assert await receive(b, state) == 201
        assert outcomes(b) == {"other_version": 1} and received(b) is None


async def test_cancelled_move_releases_its_kv(tmp_path: Path) -> None:
    """The sender has cancelled it while the KV was fetched, or afterwards."""
    async with exported(tmp_path) as (_, b, agent, state, _):
        engine = engine_of(b)
        assert isinstance(engine, ExportingEngine)

        async def cancel() -> None:
            assert (await b.http.delete(f"{PATH}/{agent.id}")).status_code == 404

        engine.on_added = cancel
        assert await receive(b, state) == 422
        assert outcomes(b) == {"received": 1}
        assert b.server.sessions.num_open == 0


async def test_returned_session_releases_its_kv(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, b, agent, state, _):
        assert await receive(b, state) == 201
        assert b.server.kv_reuse.cache.num_bytes
        assert (await b.http.delete(f"{PATH}/{agent.id}")).status_code == 204
        assert b.server.kv_reuse.cache.num_bytes == 0


async def test_session_received_twice_has_its_kv_once(tmp_path: Path) -> None:
    async with exported(tmp_path) as (_, b, agent, state, _):
        assert sorted(await asyncio.gather(receive(b, state), receive(b, state))) == [201, 422]
        assert b.server.kv_reuse.cache.num_spans <= 1
        await get(b, f"/v1/sessions/{agent.id}", method="DELETE")


async def test_refused_session_is_exported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.moves.session_sender.RETRY_SECONDS", 0.05)
    async with pair(tmp_path) as (a, b), agents_of(a) as [agent]:
        sampled = await turn(a, agent, PROMPT)
        store = b.server.sessions.store
        store._max_bytes, max_bytes = 0, store._max_bytes
        draining = asyncio.create_task(drain(a))
        while not a.server.metrics.sessions.moves.labels("kept")._value.get():
            await asyncio.sleep(0.001)
        store._max_bytes = max_bytes
        await draining
        await turn(b, agent, [*PROMPT, *sampled, 9, 9])
        assert loaded_tokens(b) == END
        await is_released(a, b)


async def test_exports_take_a_limited_time_together(tmp_path: Path) -> None:
    """The first one uses all of it. All sessions are moved."""
    async with pair(tmp_path, move_seconds=0.4) as (a, b), agents_of(a, n=3) as agents:
        for agent in agents[:2]:
            await turn(a, agent, PROMPT)
        engine = engine_of(a)
        assert isinstance(engine, ExportingEngine)
        engine.exports = False
        await drain(a)
        assert outcomes(a) == {"timeout": 1, "too_large": 1} and outcomes(b) == {}
        assert b.server.sessions.num_open == 3
        assert not engine.running
        await is_released(a, b)


async def test_session_moves_without_kv_if_the_export_has_no_room(tmp_path: Path) -> None:
    async with pair(tmp_path) as (a, b), agents_of(a) as [agent]:
        await turn(a, agent, PROMPT)
        prompt_kv, tokens, others = a.server.prompt_kv, [1] * END, list[Export]()
        while not others or others[-1].export_slot is not None:
            others.append(prompt_kv.begin("local", [len(others), *tokens], 60.0))
        await drain(a)
        assert outcomes(a) == {"no_room": 1} and received(b) is None
        for export in others:
            prompt_kv.abandon(export)


async def test_session_moves_without_its_kv_after_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as (a, b), agents_of(a) as [agent]:
        await turn(a, agent, PROMPT)
        monkeypatch.setattr(a.server._session_sender._kv._exports, "begin", _fail)
        await drain(a)
        assert b.server.sessions.num_open == 1 and outcomes(a) == {"failed": 1}


async def test_session_is_received_without_its_kv_after_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with exported(tmp_path) as (_, b, _, state, _):
        monkeypatch.setattr(b.server._session_kv_importer._reader, "read", _fail)
        assert await receive(b, state) == 201
        await is_released_by(b)
        assert outcomes(b) == {"failed": 1} and received(b) is None


async def test_kv_of_a_session_that_keeps_kv_of_older_weights_is_not_fetched(
    tmp_path: Path,
) -> None:
    async with exported(tmp_path) as (_, b, _, state, _):
        state["group"]["options"]["keep_kv"] = {}
        assert await receive(b, state) == 201
        assert outcomes(b) == {"disabled": 1} and received(b) is None


def _fail(*_: object) -> None:
    raise RuntimeError("unexpected")
