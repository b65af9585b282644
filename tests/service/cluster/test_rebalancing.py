"""A busy replica moves rollouts to one with free sequences, without a loss or a second move."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from coppice.wire.moves import MovedRollout
from engine.errors import EngineDead
from service.cluster.in_memory import InMemoryRegistry
from service.cluster.registry import Replica
from service.cluster.settings import ClusterSettings
from service.http.errors import NotReady
from service.moves.rebalancer import NUM_VIEWS, Rebalancer, shift
from service.rollouts.rollout import Rollout
from tests.service.cluster.test_move_outcomes import sender_of
from tests.service.cluster.test_moves import (
    ASYNC,
    LONG,
    PROMPT,
    engine_of,
    post,
    replicas,
    see_each_other,
    submitted,
)
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served

pytestmark = pytest.mark.slow

IDLE = Replica(
    id="a" * 12, url="http://a", state="serving", version="v0", sequence=0, num_sequences=100
)
NEVER = {"heartbeat_seconds": 1000.0, "expire_seconds": 3000.0}
"""Heartbeats only when a test calls for one."""


def loaded(name: str, num_samples: int, num_sequences: int = 100) -> Replica:
    return replace(IDLE, id=name * 12, num_samples=num_samples, num_sequences=num_sequences)


def moved(own: Replica, *peers: Replica) -> tuple[str, int] | None:
    found = shift(own, peers)
    return None if found is None else (found.peer.id[0], found.num_samples)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[list[Served]]:
    async with rebalanced(tmp_path) as served:
        yield served


def rebalanced(tmp_path: Path, number: int = 2, **cluster: Any) -> Any:
    settings: dict[str, Any] = {"rebalance": True, **NEVER, **cluster}
    return replicas(tmp_path, InMemoryRegistry(), number, cluster=settings)


async def running(served: Served, number: int, request: dict[str, Any]) -> list[Any]:
    """Requests for `number` rollouts of two samples each, which have all begun."""
    calling = []
    for index in range(number):
        calling.append(asyncio.create_task(post(served, request)))
        await running_samples(served, 2 * index + 2)
    return calling


async def compare(*served: Served) -> None:
    """Compare the load of all replicas, which know the current load of the others."""
    await see_each_other(*served)
    for each in served:
        await each.server._rebalancer._compare()


async def samples_of(calling: list[Any]) -> list[list[int]]:
    answers = [(await each).json() for each in calling]
    return [s["token_ids"] for answer in answers for s in answer["groups"][0]["samples"]]


def test_samples_are_moved_until_both_replicas_have_the_same_load() -> None:
    assert moved(loaded("b", 80), IDLE) == ("a", 40)
    assert moved(loaded("b", 80), loaded("a", 20)) == ("a", 30)
    assert moved(loaded("b", 90), loaded("a", 0, 50)) == ("a", 30)


def test_no_more_samples_are_moved_than_the_peer_has_free_sequences() -> None:
    assert moved(loaded("b", 500), loaded("a", 90)) == ("a", 10)
    assert moved(loaded("b", 500), loaded("a", 100)) is None


@pytest.mark.parametrize(("own", "peer"), [(24, 0), (80, 41), (0, 0), (20, 80)])
def test_small_differences_and_small_loads_move_nothing(own: int, peer: int) -> None:
    assert moved(loaded("b", own), loaded("a", peer)) is None


def test_each_replica_receives_samples_of_one_other_only() -> None:
    fleet = [loaded("a", 0), loaded("b", 10), loaded("c", 60), loaded("d", 90)]
    found = [moved(own, *(each for each in fleet if each is not own)) for own in fleet]
    assert found == [None, None, ("b", 25), ("a", 45)]


def test_replicas_of_another_release_are_left_out() -> None:
    assert moved(loaded("b", 80), loaded("a", 0, 0)) is None
    assert moved(loaded("b", 80, 0), IDLE) is None


def test_rebalancing_without_time_for_moves_is_refused() -> None:
    with pytest.raises(ValidationError, match="move_seconds"):
        ClusterSettings(rebalance=True, move_seconds=0)


async def test_idle_replica_gets_half_of_the_samples(pair: list[Served]) -> None:
    a, b = pair
    calling = await running(a, 4, body(PROMPT, **LONG))
    engine_of(a).step(5)
    for _ in range(NUM_VIEWS - 1):
        await compare(a, b)
    assert engine_of(b).submitted == []  # the imbalance may be over at the next heartbeat
    await compare(a, b)
    await submitted(b, 4)
    assert [len(engine_of(each).running) for each in pair] == [4, 4]
    for each in pair:
        engine_of(each).step(7)
    assert await samples_of(calling) == [list(range(3, 15))] * 8
    metrics = (await a.http.get("/metrics")).text
    assert "coppice_rollouts_rebalanced_total 2.0" in metrics


async def test_newest_rollouts_are_moved(pair: list[Served]) -> None:
    a, b = pair
    calling = await running(a, 2, body(PROMPT, **LONG))
    engine_of(a).step(5)
    calling += await running_in_addition(a, body(group(9, n=2, seed=7), **LONG))
    for _ in range(NUM_VIEWS):
        await compare(a, b)
    await submitted(b, 2)
    assert [each.prompt_token_ids for each in engine_of(b).submitted] == [[9], [9]]
    for each in pair:
        engine_of(each).step(12)
    await samples_of(calling)


async def running_in_addition(served: Served, request: dict[str, Any]) -> list[Any]:
    number = len(engine_of(served).running)
    calling = asyncio.create_task(post(served, request))
    await running_samples(served, number + 2)
    return [calling]


async def test_rollout_is_moved_once(pair: list[Served]) -> None:
    a, b = pair
    calling = await running(a, 4, body(PROMPT, **LONG))
    for _ in range(NUM_VIEWS):
        await compare(a, b)
    await submitted(b, 4)
    engine_of(a).step(12)  # now b is the busy one
    await submitted_to_end(a)
    for _ in range(2 * NUM_VIEWS):
        await compare(a, b)
    assert (len(engine_of(a).submitted), len(engine_of(b).running)) == (8, 4)
    engine_of(b).step(12)
    await samples_of(calling)


async def submitted_to_end(served: Served) -> None:
    while served.server.rollouts.num_running:
        await asyncio.sleep(0.001)


async def test_group_is_not_divided(pair: list[Served]) -> None:
    """Half of its samples would balance the load, but they share the KV of their prompt."""
    a, b = pair
    calling = asyncio.create_task(post(a, body(group(1, n=8), **LONG)))
    await running_samples(a, 8)
    for _ in range(2 * NUM_VIEWS):
        await compare(a, b)
    assert engine_of(b).submitted == []
    engine_of(a).step(12)
    await samples_of([calling])


async def test_refused_moves_are_not_repeated_at_once(pair: list[Served]) -> None:
    a, b = pair
    b.server.admission.close()
    calling = await running(a, 4, body(PROMPT, **LONG))
    for _ in range(3 * NUM_VIEWS):
        await compare(a, b)
    assert len(engine_of(a).submitted) == 8 + 4  # suspended once, and continued here
    engine_of(a).step(12)
    assert await samples_of(calling) == [list(range(3, 15))] * 8


@pytest.mark.parametrize("reason", ["setting", "draining", "paused", "activation"])
async def test_nothing_is_moved_without_the_setting_or_in_a_pause(
    tmp_path: Path, reason: str
) -> None:
    async with rebalanced(tmp_path, rebalance=reason != "setting") as (a, b):
        calling = await running(a, 4, body(PROMPT, **LONG))
        if reason == "draining":
            a.server.readiness.draining = True
        elif reason == "paused":
            await a.http.post("/v1/pause", json={"mode": "keep"})
        elif reason == "activation":
            a.server.rollouts._gate.clear()
        for _ in range(2 * NUM_VIEWS):
            await compare(a, b)
        assert engine_of(b).submitted == []
        a.server.rollouts._gate.set()
        await a.http.post("/v1/resume")
        engine_of(a).step(12)
        await samples_of(calling)


async def test_drain_moves_what_rebalancing_has_left(pair: list[Served]) -> None:
    """Both want to move the same rollouts: each of them gets one of two moves at a time."""
    a, b = pair
    calling = await running(a, 4, body(PROMPT, **LONG))
    for _ in range(NUM_VIEWS - 1):
        await compare(a, b)
    await see_each_other(a, b)
    rebalancing = asyncio.create_task(a.server._rebalancer._compare())
    draining = asyncio.create_task(a.server.drain(60))
    await submitted(b, 8)
    await asyncio.gather(rebalancing, draining)
    assert len(engine_of(b).submitted) == 8
    engine_of(b).step(12)
    assert await samples_of(calling) == [list(range(3, 15))] * 8


async def test_moved_rollout_is_found_at_its_source_after_the_address_has_expired(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"cluster": {"rebalance": True, **NEVER}}
    settings["limits"] = {"keep_answers_seconds": 0.05}
    async with replicas(tmp_path, InMemoryRegistry(), **settings) as (a, b):
        accepted = []
        for index in range(2):
            request = body(PROMPT, **LONG)
            accepted.append(await a.http.post("/v1/rollouts", json=request, headers=ASYNC))
            await running_samples(a, 2 * index + 2)
        for _ in range(NUM_VIEWS):
            await compare(a, b)
        await submitted(b, 2)
        await asyncio.sleep(0.1)
        places = [each.headers["location"] for each in accepted]
        found = [await a.http.get(place, follow_redirects=True) for place in places]
        assert [each.status_code for each in found] == [202, 202]
        assert found[1].url.port == b.http.base_url.port
        engine_of(a).step(12)
        engine_of(b).step(12)


async def test_failed_comparison_does_not_end_rebalancing(
    pair: list[Served], caplog: pytest.LogCaptureFixture
) -> None:
    server, num_calls = pair[0].server, 0

    def fails_once() -> bool:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise EngineDead("killed")
        return False

    rebalancer = Rebalancer(
        server.rollouts,
        server.cluster,
        sender_of(pair[0]),
        seconds=1.0,
        is_enabled=fails_once,
        on_moved=lambda _: None,
    )
    async with asyncio.timeout(30), rebalancer.running():
        while num_calls < 2:
            await server.cluster.refresh()
            await asyncio.sleep(0.001)
    assert "rebalancing failed" in caplog.text


async def test_heartbeats_start_moves(tmp_path: Path) -> None:
    async with rebalanced(tmp_path, heartbeat_seconds=0.05) as (a, b):
        calling = await running(a, 4, body(PROMPT, **LONG))
        await submitted(b, 4)
        while engine_of(a).running or engine_of(b).running:
            engine_of(a).step(1)
            engine_of(b).step(1)
            await asyncio.sleep(0.001)
        assert await samples_of(calling) == [list(range(3, 15))] * 8


async def test_rollout_returns_to_the_replica_that_has_moved_it(pair: list[Served]) -> None:
    a, b = pair
    request, keys = body(PROMPT, **LONG), [{"idempotency-key": str(index)} for index in range(2)]
    calling = []
    for index, key in enumerate(keys):
        calling.append(asyncio.create_task(post(a, request, **key)))
        await running_samples(a, 2 * index + 2)
    engine_of(a).step(3)
    for _ in range(NUM_VIEWS):
        await compare(a, b)
    await submitted(b, 2)
    engine_of(b).step(4)
    await b.server.drain(60)
    await submitted(a, 6)
    retries = [asyncio.create_task(post(a, request, **key)) for key in keys]
    engine_of(a).step(9)
    assert await samples_of(calling) == [list(range(3, 15))] * 4
    assert await samples_of(retries) == [list(range(3, 15))] * 4
    assert len(engine_of(a).submitted) == 6
    a.server.rollouts.check()


async def test_rollout_that_was_kept_is_not_suspended_again_at_once(
    pair: list[Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer accepts one of the two that are selected, and refuses the other one each time."""
    a, b = pair
    calling = await running(a, 4, body(PROMPT, **LONG))
    refused = a.server.rollouts.in_flight()[0].id
    receive = b.server.move_receiver.receive

    async def refuses_one(state: MovedRollout) -> Rollout:
        if state.id == refused:
            raise NotReady("full", retry_after_seconds=1)
        return await receive(state)

    monkeypatch.setattr(b.server.move_receiver, "receive", refuses_one)
    for _ in range(NUM_VIEWS):
        await compare(a, b)
    await submitted(b, 2)
    engine_of(b).step(12)  # b is idle again
    await submitted_to_end(b)
    for _ in range(2 * NUM_VIEWS):
        await compare(a, b)
    assert len(engine_of(a).submitted) == 8 + 2  # the refused one was suspended once
    assert len(engine_of(b).submitted) > 2
    for each in pair:
        engine_of(each).step(12)
    assert await samples_of(calling) == [list(range(3, 15))] * 8


async def test_pause_that_begins_meanwhile_prevents_a_move(pair: list[Served]) -> None:
    a, b = pair
    calling = await running(a, 4, body(PROMPT, **LONG))
    await see_each_other(a, b)
    rollouts, peer_id = a.server.rollouts.in_flight(), b.server.cluster.own_id
    await a.server.move_sender.send_to(peer_id, rollouts, 30, lambda: False)
    assert (len(engine_of(a).submitted), engine_of(b).submitted) == (8, [])
    engine_of(a).step(12)
    await samples_of(calling)
