"""Moves to replicas that do not respond, die, or run another release lose and repeat nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import Replica
from tests.service.cluster.test_handoff import (
    LONG,
    PROMPT,
    answer_after_a_refused_move,
    drain,
    engine_of,
    post,
    replicas,
    see_each_other,
)
from tests.service.test_rollouts import body, running_samples

pytestmark = pytest.mark.slow

SECONDS = {"silent": 3.0, "stalls": 3.0}
"""Time that passes for replicas that do not respond; the others fail at once."""
OTHER_ID = "c" * 12
HEADERS = b"content-length: 0\r\nconnection: close\r\n\r\n"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\n" + HEADERS
UNPROCESSABLE = b"HTTP/1.1 422 Unprocessable Content\r\n" + HEADERS
NO_CONTENT = b"HTTP/1.1 204 No Content\r\n" + HEADERS
STALL_BYTES = 64


@asynccontextmanager
async def peer(registry: InMemoryRegistry, behaviour: str) -> AsyncIterator[list[bytes]]:
    """Registered replica that is silent, reads slowly, dies, or is of another release.

    The first two respond to the cancellation of a move. Yields the first lines of the requests.
    """
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readline())
        if behaviour in SECONDS and requests[-1].startswith(b"DELETE"):
            writer.write(NO_CONTENT)
        elif behaviour == "silent":
            await reader.read()
        elif behaviour == "stalls":
            while await reader.read(STALL_BYTES):
                await asyncio.sleep(0.01)
        elif behaviour == "older":
            writer.write(NOT_FOUND)
        elif behaviour == "newer":
            writer.write(UNPROCESSABLE)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    entry = Replica(id=OTHER_ID, url=url, state="serving", version="v0", sequence=0)
    await registry.beat(entry, ttl_seconds=60)
    async with server:
        yield requests


@pytest.mark.parametrize("behaviour", ["silent", "stalls", "dies", "older", "newer"])
async def test_rollout_ends_where_it_is_if_the_only_peer_fails(
    tmp_path: Path, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.handoff.sender.CANCEL_SECONDS", 30.0)
    registry = InMemoryRegistry()
    handoff_seconds = SECONDS.get(behaviour, 60.0)
    cluster: dict[str, Any] = {"cluster": {"handoff_seconds": handoff_seconds}}
    async with (
        replicas(tmp_path, registry, 1, **cluster) as (a,),
        peer(registry, behaviour) as requests,
    ):
        await see_each_other(a)
        answer = await answer_after_a_refused_move(a, **{"idempotency-key": "k"})
        (claim,) = a.server.idempotency_keys.held
        assert await registry.holder(claim) == a.server.cluster.own_id
    tokens = [sample["token_ids"] for sample in answer["groups"][0]["samples"]]
    assert tokens == [list(range(3, 15))] * 2
    assert requests[0].startswith(b"POST /v1/handoff/rollouts ")
    if behaviour not in (
        "older",
        "newer",
    ):  # the outcome is unknown: the other replica must not run it, too
        assert requests[1].startswith(b"DELETE /v1/handoff/rollouts/")


@pytest.mark.parametrize("behaviour", ["dies", "older", "newer"])
async def test_next_replica_continues_if_the_first_one_fails(
    tmp_path: Path, behaviour: str
) -> None:
    registry = InMemoryRegistry()
    async with (
        replicas(tmp_path, registry) as (a, b),
        peer(registry, behaviour),
    ):
        await see_each_other(a, b)
        calling = [asyncio.create_task(post(a, body(PROMPT, **LONG))) for _ in range(6)]
        await running_samples(a, 12)
        engine_of(a).step(5)
        await drain(a)
        await running_samples(b, 12)
        engine_of(b).step(7)
        answers = [(await each).json() for each in calling]
    samples = [sample for each in answers for sample in each["groups"][0]["samples"]]
    assert [sample["token_ids"] for sample in samples] == [list(range(3, 15))] * 12


async def test_paused_replica_accepts_no_moves(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        await b.http.post("/v1/pause", json={"mode": "keep"})
        answer = await answer_after_a_refused_move(a)
        assert answer["outcome"] == "done"
        assert engine_of(b).submitted == []
