"""A draining replica moves its agent sessions to another one, where the agents continue them."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.cluster.idempotency_claim import move_key
from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import ClusterView, Replica
from tests.cluster import replica
from tests.fake_engine import FakeEngine
from tests.service.sessions.agents import HELLO, tokens
from tests.service.sessions.fleets import (
    DRAIN_SECONDS,
    agents_of,
    call,
    drain,
    get,
    records,
    replicas,
)
from tests.service.sessions.test_sessions import replied
from tests.service.test_rollouts import running_samples

pytestmark = pytest.mark.slow


async def test_agent_continues_its_session_with_the_same_key_and_url(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (a, b), agents_of(a, metadata={"task": "17"}) as [agent]:
        first = await call(agent, HELLO)
        await drain(a)
        second = await call(agent, replied(HELLO, first, "next"))
        await call(agent, replied(replied(HELLO, first, "next"), second, "last"))
        finish = {"method": "POST", "json": {"reward": 0.5}}
        answer = await get(b, f"/v1/sessions/{agent.id}/finish", **finish)
    assert [turn["reason"] for turn in answer["turns"]] == [
        "new_conversation",
        "extended",
        "extended",
    ]
    assert tokens(answer)[:3] == [
        (True, [5, 6, 7]),
        (False, list(b"next")),
        (True, [12, 13, 14]),
    ]
    assert (answer["reward"], answer["metadata"]) == (0.5, {"task": "17"})
    engine = b.server.engine
    assert isinstance(engine, FakeEngine)
    assert [sample.cache_salt for sample in engine.submitted] == [agent.id] * 2


async def test_tree_is_the_same_before_and_after_the_move(tmp_path: Path) -> None:
    options = {"return_support": True, "top_logprobs": 2}
    async with replicas(tmp_path) as (a, b), agents_of(a, **options) as [agent]:
        first = await call(agent, HELLO)
        await call(agent, replied(HELLO, first, "next"))
        await call(agent, replied(HELLO, "other", "branch"))
        before = await get(a, f"/v1/sessions/{agent.id}/tree")
        status = await get(a, f"/v1/sessions/{agent.id}")
        await drain(a)
        after = await get(b, f"/v1/sessions/{agent.id}/tree")
        moved = await get(b, f"/v1/sessions/{agent.id}")
        await call(agent, HELLO)
        retried = await get(b, f"/v1/sessions/{agent.id}")
    assert after == before
    assert moved.pop("seconds_left") == pytest.approx(status.pop("seconds_left"), abs=10)
    assert moved == status
    assert retried["attached"]["retry"] == 1


async def test_memory_of_a_moved_session_is_the_same(tmp_path: Path) -> None:
    options = {"return_support": True, "top_logprobs": 2}
    async with replicas(tmp_path) as (a, b), agents_of(a, **options) as [agent]:
        await call(agent, HELLO)
        await get(a, f"/v1/sessions/{agent.id}/tree")
        before = a.server.sessions.num_bytes
        await drain(a)
        assert (a.server.sessions.num_bytes, a.server.sessions.num_open) == (0, 0)
        assert b.server.sessions.num_bytes == pytest.approx(before, rel=0.1)
        assert b.server.sessions.num_open == 1


async def test_stream_of_a_group_has_each_session_once(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (a, b), agents_of(a, n=3, group="g") as (one, two, three):
        group = f"{one.id.partition('.')[0]}.g"
        await call(one, HELLO)
        await get(a, f"/v1/sessions/{one.id}/finish", method="POST", json={"reward": 1.0})
        reading = asyncio.create_task(records(a, group))
        await asyncio.sleep(0.05)
        await drain(a)
        [first] = await reading
        await get(b, f"/v1/sessions/{two.id}/finish", method="POST", json={"reward": 0.0})
        await get(b, f"/v1/sessions/{three.id}", method="DELETE")
        others = await records(b, group, after=first["session"]["sequence"])
        whole = await records(a, group)
    assert [record["session"]["id"] for record in (first, *others[:-1])] == [
        one.id,
        two.id,
        three.id,
    ]
    assert (others[-1]["type"], others[-1]["num_finished"]) == ("end", 2)
    assert [record["type"] for record in whole] == ["session"] * 3 + ["end"]


async def test_running_call_ends_before_its_session_moves(tmp_path: Path) -> None:
    async with replicas(tmp_path, instant=False) as (a, b), agents_of(a, n=2) as (busy, idle):
        calling = asyncio.create_task(call(busy, HELLO))
        await running_samples(a, 1)
        draining = asyncio.create_task(drain(a))
        while not b.server.sessions.num_open:
            await asyncio.sleep(0.001)
        other = asyncio.create_task(call(idle, HELLO))
        await running_samples(b, 1)
        assert a.server.sessions.num_open == 1
        for served in (a, b):
            engine: Any = served.server.engine
            engine.step(3)
        first = await calling
        await other
        await draining
        assert b.server.sessions.num_open == 2
        calling = asyncio.create_task(call(busy, replied(HELLO, first, "next")))
        await running_samples(b, 1)
        engine.step(3)
        await calling
        status = await get(b, f"/v1/sessions/{busy.id}")
    assert status["attached"] == {"new_conversation": 1, "extended": 1}


async def test_session_that_is_finished_during_its_call_is_streamed_by_the_receiver(
    tmp_path: Path,
) -> None:
    async with replicas(tmp_path, instant=False) as (a, b), agents_of(a, n=2, group="g") as agents:
        group = f"{agents[0].id.partition('.')[0]}.g"
        calling = asyncio.create_task(call(agents[0], HELLO))
        await running_samples(a, 1)
        draining = asyncio.create_task(drain(a))
        while not b.server.sessions.num_open:
            await asyncio.sleep(0.001)
        path = f"/v1/sessions/{agents[0].id}/finish"
        finished = await get(a, path, method="POST", json={"reward": 1.0})
        await asyncio.gather(calling, return_exceptions=True)
        await draining
        await get(b, f"/v1/sessions/{agents[1].id}", method="DELETE")
        found = await records(b, group)
    assert (finished["state"], len(found)) == ("finished", 3)
    assert found[-1] == {"type": "end", "num_sessions": 2, "num_finished": 1, "num_dropped": 0}


async def test_repeated_request_finds_the_moved_sessions(tmp_path: Path) -> None:
    async with replicas(tmp_path, 3) as (a, b, c):
        request: Any = {"json": {"n": 2}, "headers": {"idempotency-key": "k"}}
        first = await get(a, "/v1/sessions", method="POST", **request)
        await drain(a)
        again = [
            await get(served, "/v1/sessions", method="POST", **request) for served in (a, b, c)
        ]
    keys = [(start["id"], start["key"]) for start in first["sessions"]]
    for answer in again:
        assert [(start["id"], start["key"]) for start in answer["sessions"]] == keys


async def test_session_is_found_after_its_replica_has_left(tmp_path: Path) -> None:
    async with replicas(tmp_path, 3) as (a, b, c), agents_of(a, group="g") as [agent]:
        first = await call(agent, HELLO)
        await drain(a)
        await a.server.cluster.registry.leave(a.server.cluster.own_id)
        for served in (b, c):
            await served.server.cluster.refresh()
        for served in (b, c):
            path = f"{served.url}/sessions/{agent.id}/v1/chat/completions"
            request = {"messages": replied(HELLO, first, "next")}
            answer = await agent.http.post(path, json=request, headers={"x-api-key": agent.key})
            assert answer.status_code == 200
            wrong = await agent.http.post(path, json=request, headers={"x-api-key": "wrong"})
            assert wrong.status_code == 401
            assert (await get(served, f"/v1/sessions/{agent.id}"))["state"] == "open"
        await get(c, f"/v1/sessions/{agent.id}", method="DELETE")
        assert len(await records(c, f"{agent.id.partition('.')[0]}.g")) == 2


async def test_session_handoff_again(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (a, b), agents_of(a) as [agent]:
        first = await call(agent, HELLO)
        await drain(a)
        async with replicas(tmp_path / "c", 1, a.server.cluster.registry) as [c]:  # type: ignore[arg-type]
            await b.server.cluster.refresh()
            await drain(b)
            await call(agent, replied(HELLO, first, "next"))
            status = await get(c, f"/v1/sessions/{agent.id}")
            assert c.server.sessions.num_open == 1
    assert status["attached"] == {"new_conversation": 1, "extended": 1}


async def test_surplus_sessions_are_cancelled_on_the_receiver(tmp_path: Path) -> None:
    finish = {"num_sessions": 2}
    async with replicas(tmp_path) as (a, b), agents_of(a, n=3, finish=finish) as agents:
        await get(a, f"/v1/sessions/{agents[0].id}/finish", method="POST", json={})
        await drain(a)
        await get(b, f"/v1/sessions/{agents[1].id}/finish", method="POST", json={})
        status = await get(b, f"/v1/sessions/{agents[2].id}")
    assert (status["state"], status["end_reason"]) == ("cancelled", "surplus")


async def test_response_that_was_not_moved_must_be_sent_whole(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (a, b), agents_of(a) as [agent]:
        headers = {"x-api-key": agent.key}
        first = await agent.post("/v1/responses", {"input": "hello"}, headers=headers)
        await drain(a)
        request = {"input": "next", "previous_response_id": first.json()["id"]}
        refused = await agent.post("/v1/responses", request, headers=headers)
        assert b.server.sessions.num_open == 1
    assert (first.status_code, refused.status_code) == (200, 404)
    assert "not found" in refused.json()["error"]["message"]


async def test_cancellation_that_reaches_the_sender_does_not_end_the_session(
    tmp_path: Path,
) -> None:
    """The sender has itself received the session from a third replica."""
    async with replicas(tmp_path) as (a, b), agents_of(a) as [agent]:
        await call(agent, HELLO)
        await drain(a)
        session = b.server.sessions.store.find(agent.id)
        assert session is not None
        with session.moving():
            response = await b.http.delete(f"/v1/handoff/sessions/{agent.id}")
        assert response.status_code == 404
        assert b.server.sessions.num_open == 1


class SlowView(InMemoryRegistry):
    """Registry that sends its second replica no view before `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.first: str | None = None

    async def beat(self, replica: Replica, *, ttl_seconds: float) -> ClusterView:
        self.first = self.first or replica.id
        if replica.id != self.first:
            await self.gate.wait()
        return await super().beat(replica, ttl_seconds=ttl_seconds)


async def test_agent_that_calls_a_replica_without_a_view_of_the_cluster_may_retry(
    tmp_path: Path,
) -> None:
    """A load balancer may send a call to a replica that starts; 401 would end the agent."""
    shared = SlowView()
    async with (
        replica(tmp_path / "a", FakeEngine(), shared) as a,
        agents_of(a) as (agent,),
        replica(tmp_path / "b", FakeEngine(), shared, False) as b,
    ):
        path = "/v1/chat/completions"
        at_b = replace(agent, url=f"{b.url}/sessions/{agent.id}")
        early = await at_b.post(path, {"messages": HELLO}, follow_redirects=False)
        assert early.status_code == 503
        assert int(early.headers["retry-after"]) > 0
        shared.gate.set()
        await b.server.cluster.refresh()
        later = await at_b.post(path, {"messages": HELLO}, follow_redirects=False)
        assert later.headers["location"] == agent.url + path


async def test_agent_whose_session_is_arriving_may_retry(tmp_path: Path) -> None:
    """The receiver has taken over the key of a session whose first replica has left."""
    session_id = f"{'d' * 12}.0"
    async with replicas(tmp_path) as (a, _), agents_of(a) as (agent,):
        other = replace(agent, url=agent.url.replace(agent.id, session_id))
        statuses = list[int]()
        for is_arriving in (False, True):
            if is_arriving:
                await a.server.idempotency_keys.take_over(move_key(session_id), "e" * 12)
            statuses.append((await other.chat()).status_code)
        assert statuses == [401, 503]


async def test_sessions_do_not_wait_for_rollouts_that_cannot_move(tmp_path: Path) -> None:
    """The call of another session runs to its end, for longer than rollouts are moved."""
    cluster = {"handoff_seconds": DRAIN_SECONDS}
    async with (
        replicas(tmp_path, instant=False, cluster=cluster) as (a, b),
        agents_of(a) as [busy],
        agents_of(a),
    ):
        calling = asyncio.create_task(call(busy, HELLO))
        await running_samples(a, 1)
        draining = asyncio.create_task(drain(a))
        async with asyncio.timeout(DRAIN_SECONDS / 2):
            while not b.server.sessions.num_open:
                await asyncio.sleep(0.001)
        assert not calling.done()
        engine = a.server.engine
        assert isinstance(engine, FakeEngine)
        engine.step(3)
        await calling
        await draining
