"""Moves of sessions that are refused, invalid, or have an unknown outcome lose nothing."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coppice.wire.sessions import SessionFinishRequest
from service.cluster.in_memory_registry import InMemoryRegistry
from service.errors import Draining
from tests.fake_engine import FakeEngine
from tests.service.cluster.test_handoff import see_each_other
from tests.service.cluster.test_handoff_faults import peer
from tests.service.keyfile import bearer, write_keys
from tests.service.sessions.agents import HELLO, Agent
from tests.service.sessions.fleets import (
    HeldRegistry,
    agents_of,
    call,
    drain,
    get,
    records,
    replicas,
)
from tests.service.test_rollouts import running_samples
from tests.serving import Served, serving

pytestmark = pytest.mark.slow

PATH = "/v1/handoff/sessions"
OUTCOMES = ("moved", "kept")


async def state_of(served: Served, agent: Agent) -> Any:
    """Body of the request that moves a session, and all others of its group that have ended."""
    store = served.server.sessions.store
    session = served.server.sessions.get(agent.id, owner="local")
    await session.wait_until_idle()
    group = store.group_of(session)
    sessions = [*group.ended.sessions, session]
    offer = await served.server.handoff.open_sessions.state(group, sessions)
    return json.loads(offer.model_dump_json())


async def test_refused_session_is_offered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.handoff.sender.RETRY_SECONDS", 0.05)
    async with replicas(tmp_path) as (a, b), agents_of(a) as [agent]:
        b.server.readiness.draining = True
        draining = asyncio.create_task(drain(a))
        kept = a.server.metrics.cluster.handoffs.labels("sessions", "kept")
        while not kept._value.get():
            await asyncio.sleep(0.001)
        assert (await get(a, f"/v1/sessions/{agent.id}"))["state"] == "open"
        b.server.readiness.draining = False
        await draining
        assert (await get(b, f"/v1/sessions/{agent.id}"))["state"] == "open"


async def test_session_that_no_replica_accepts_is_cancelled_with_its_tree(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (a, b), agents_of(a, group="g") as [agent]:
        await call(agent, HELLO)
        b.server.readiness.draining = True
        await a.server.drain(0.5)
        [ended, _] = await records(a, f"{agent.id.partition('.')[0]}.g")
        assert b.server.sessions.num_bytes == 0
    assert ended["session"]["end_reason"] == "drain"
    assert len(ended["session"]["turns"]) == 1


async def test_sessions_that_the_drain_cancels_are_sent_to_their_group(tmp_path: Path) -> None:
    async with (
        replicas(tmp_path, instant=False) as (a, b),
        agents_of(a, n=2, group="g") as (busy, idle),
    ):
        calling = asyncio.create_task(call(busy, HELLO))
        while not a.server.sessions.get(busy.id, owner="local").calls:
            await asyncio.sleep(0.001)
        await a.server.drain(3.0)
        await asyncio.gather(calling, return_exceptions=True)
        await get(b, f"/v1/sessions/{idle.id}", method="DELETE")
        found = await records(b, f"{busy.id.partition('.')[0]}.g")
    reasons = [each["session"]["end_reason"] for each in found[:-1]]
    assert (reasons, found[-1]["num_dropped"]) == (["drain", "cancelled"], 0)


async def test_group_with_a_session_that_is_too_large_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.handoff.sender.RETRY_SECONDS", 0.01)
    limits: dict[str, Any] = {"max_body_bytes": 3500}
    async with (
        replicas(tmp_path, limits=limits) as (a, b),
        agents_of(a, n=2) as large,
        agents_of(a, n=2) as small,
    ):
        await call(large[1], [{"role": "user", "content": "long" * 100}])
        await a.server.drain(2.0)
        kept = [(await get(a, f"/v1/sessions/{each.id}"))["end_reason"] for each in large]
        moved = [(await get(b, f"/v1/sessions/{each.id}"))["state"] for each in small]
        handoffs = a.server.metrics.cluster.handoffs
        counts = [handoffs.labels("sessions", each)._value.get() for each in OUTCOMES]
    assert (kept, moved, counts) == (["drain", "drain"], ["open", "open"], [2, 1])


@pytest.mark.parametrize("behaviour", ["silent", "dies", "older"])
async def test_session_stays_if_the_only_peer_fails(
    tmp_path: Path, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.handoff.sender.OFFER_SECONDS", 0.5)
    monkeypatch.setattr("service.handoff.sender.CANCEL_SECONDS", 30.0)
    registry = InMemoryRegistry()
    async with (
        replicas(tmp_path, 1, registry) as [a],
        agents_of(a) as [agent],
        peer(registry, behaviour) as requests,
    ):
        await see_each_other(a)
        await call(agent, HELLO)
        draining = asyncio.create_task(drain(a))
        while not a.server.metrics.cluster.handoffs.labels("sessions", "kept")._value.get():
            await asyncio.sleep(0.001)
        finish: Any = {"method": "POST", "json": {"reward": 1.0}}
        answer = await get(a, f"/v1/sessions/{agent.id}/finish", **finish)
        await draining
        assert not a.server.idempotency_keys.held
    assert (answer["state"], len(answer["turns"])) == ("finished", 1)
    assert requests[0].startswith(b"POST /v1/handoff/sessions ")
    if behaviour != "older":  # the outcome is unknown: the other replica must not have it, too
        assert requests[1].startswith(f"DELETE {PATH}/{agent.id} ".encode())


async def test_finish_waits_for_the_outcome_of_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.handoff.sender.OFFER_SECONDS", 0.5)
    registry = InMemoryRegistry()
    async with (
        replicas(tmp_path, 1, registry) as [a],
        agents_of(a) as [agent],
        peer(registry, "silent"),
    ):
        await see_each_other(a)
        session = a.server.sessions.get(agent.id, owner="local")
        draining = asyncio.create_task(drain(a))
        while not session.is_moving:
            await asyncio.sleep(0.001)
        path = f"/v1/sessions/{agent.id}/finish"
        finishing = asyncio.create_task(get(a, path, method="POST", json={}))
        await asyncio.sleep(0.1)
        assert session.is_open
        assert (await finishing)["state"] == "finished"
        await draining


async def test_sessions_are_accepted_once_and_can_be_returned(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (a, b), agents_of(a, n=2) as (one, two):
        await call(one, HELLO)
        await get(a, f"/v1/sessions/{one.id}", method="DELETE")
        state = await state_of(a, two)
        first = await b.http.post(PATH, json=state)
        again = await b.http.post(PATH, json=state)
        ended = [await b.http.delete(f"{PATH}/{one.id}") for _ in range(2)]
        late = await b.http.post(PATH, json=state)
        await b.server.cluster.refresh()
        assert (b.server.sessions.num_bytes, b.server.sessions.num_open) == (0, 0)
        assert (b.server.sessions.store.groups(), len(b.server.idempotency_keys)) == ([], 0)
        assert not b.server.idempotency_keys.held
    assert (first.status_code, again.status_code, late.status_code) == (201, 422, 422)
    assert [answer.status_code for answer in ended] == [204, 404]


async def test_requests_that_wait_for_returned_sessions_are_repeated_at_the_sender(
    tmp_path: Path,
) -> None:
    async with (
        replicas(tmp_path, instant=False) as (a, b),
        agents_of(a, n=2, group="g") as (one, two),
    ):
        state = await state_of(a, one)
        assert (await b.http.post(PATH, json=state)).status_code == 201
        sessions = b.server.sessions
        group = sessions.store.group("local", f"{one.id.partition('.')[0]}.g")
        reading = asyncio.create_task(anext(sessions.store.stream("local", group, 0), None))
        body = {"messages": HELLO}
        headers = {"x-api-key": one.key}
        url = f"{b.url}/sessions/{one.id}/v1/chat/completions"
        calling = asyncio.create_task(one.http.post(url, json=body, headers=headers))
        await running_samples(b, 1)
        session = sessions.get(one.id, owner="local")
        finishing = asyncio.create_task(sessions.finish(session, SessionFinishRequest()))
        while session.is_open:
            await asyncio.sleep(0)
        assert not session.ended.is_set()
        await b.server.handoff.sessions.give_back(one.id)
        async with asyncio.timeout(10):
            assert await reading is None
            with pytest.raises(Draining):
                await finishing
            await calling
        again = await get(a, f"/v1/sessions/{two.id}")
    assert again["state"] == "open"


async def test_later_session_can_be_returned_alone(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (a, b), agents_of(a, n=2) as (one, two):
        states = [await state_of(a, agent) for agent in (one, two)]
        states[1]["group"]["remaining_ids"] = []
        for state in states:
            assert (await b.http.post(PATH, json=state)).status_code == 201
        assert (await b.http.delete(f"{PATH}/{two.id}")).status_code == 204
        [group] = b.server.sessions.store.groups()
        assert (group.num_open, group.remaining_ids) == (2, {two.id})
        assert b.server.sessions.num_open == 1


async def test_receiver_does_not_wait_for_sessions_of_a_sender_that_has_left(
    tmp_path: Path,
) -> None:
    async with replicas(tmp_path) as (a, b), agents_of(a, n=2, group="g") as (one, two):
        state = await state_of(a, one)
        assert state["group"]["remaining_ids"] == [two.id]
        assert (await b.http.post(PATH, json=state)).status_code == 201
        await get(b, f"/v1/sessions/{one.id}", method="DELETE")
        await a.server.cluster.registry.leave(a.server.cluster.own_id)
        await b.server.cluster.refresh()
        b.server.sessions.check_due()
        found = await records(b, f"{one.id.partition('.')[0]}.g")
    assert [each["type"] for each in found] == ["session", "end"]
    assert found[-1]["num_dropped"] == 1


Change = Callable[[Any], object]


def segment(state: Any, index: int = -1) -> Any:
    return state["sessions"][0]["segments"][index]["segment"]


CHANGES: dict[str, Change] = {
    "version of the state": lambda s: s.update(state_version=2),
    "unknown field": lambda s: s.update(later=1),
    "key": lambda s: s["group"]["keys"].clear(),
    "source of no cluster": lambda s: s.update(source="0" * 12),
    "other id": lambda s: s["sessions"][0].update(id=f"{'0' * 12}.x"),
    "id is repeated": lambda s: s["sessions"].append(s["sessions"][0]),
    "number of ids": lambda s: s["group"]["options"].update(n=2),
    "remaining id of nobody": lambda s: s["group"]["remaining_ids"].append(f"{'0' * 12}.x"),
    "sequence of an open session": lambda s: s["sessions"][0].update(sequence=1),
    "no sequence": lambda s: s["sessions"][0].update(state="finished", end_reason="finished"),
    "no end reason": lambda s: s["sessions"][0].update(state="finished", sequence=1),
    "sequences of another century": lambda s: s["group"].update(last_sequence=2**53 - 1),
    "no parent": lambda s: segment(s).update(parent="0.7"),
    "repeated segment": lambda s: segment(s).update(id=segment(s, 0)["id"]),
    "segment id": lambda s: segment(s).update(id="0.99"),
    "segment id of another tree": lambda s: segment(s).update(id="1.0"),
    "no tokens": lambda s: segment(s, 0).update(token_ids=[]),
    "vocabulary": lambda s: segment(s, 0)["token_ids"].append(256),
    "negative token": lambda s: segment(s, 0)["token_ids"].append(-1),
    "logprobs": lambda s: segment(s)["logprobs"].pop(),
    "versions": lambda s: segment(s)["versions"][0].update(end=2),
    "kv versions": lambda s: segment(s).update(
        kv_versions=[{"version": "v0", "start": 0, "end": 1, "first_token": 9}]
    ),
    "support": lambda s: segment(s)["support"].update(vocab_size=3),
    "data of supports": lambda s: segment(s)["support"].update(data="A"),
    "top logprobs": lambda s: segment(s)["top_logprobs"].update(
        offsets=[0], token_ids=[], logprobs=[]
    ),
    "response": lambda s: s["sessions"][0]["responses"][0].update(segment="0.9"),
    "response of context": lambda s: s["sessions"][0]["responses"][0].update(
        segment=segment(s, 0)["id"]
    ),
    "kind of response": lambda s: s["sessions"][0]["responses"][0].update(num_chars=1),
    "turn": lambda s: s["sessions"][0]["turns"][0].update(segment="0.9"),
}


async def test_inconsistent_state_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    options = {"return_support": True, "top_logprobs": 1}
    async with replicas(tmp_path) as (a, b), agents_of(a, **options) as [agent]:
        await call(agent, HELLO)
        state = await state_of(a, agent)
        for name, change in CHANGES.items():
            changed = json.loads(json.dumps(state))
            change(changed)
            answer = await b.http.post(PATH, json=changed)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), name
        await b.server.cluster.refresh()
        assert (b.server.sessions.num_bytes, len(b.server.idempotency_keys)) == (0, 0)
        assert (b.server.sessions.store.groups(), b.server.idempotency_keys.held) == ([], set())
        assert (await b.http.post(PATH, json=state)).status_code == 201


async def test_session_of_another_group_is_not_taken_over(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (a, b), agents_of(a) as [agent], agents_of(b) as [victim]:
        state = await state_of(a, agent)
        group = state["group"]
        group["options"]["n"] = 2
        group["session_ids"].append(victim.id)
        group["keys"].append(victim.key[::-1])
        for remaining in ([], [victim.id]):
            group["remaining_ids"] = remaining
            answer = await b.http.post(PATH, json=state)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
        assert b.server.sessions.addresses.key_of(victim.id) == victim.key
        await call(victim, HELLO)


async def test_server_without_other_replicas_accepts_no_moves(tmp_path: Path) -> None:
    async with replicas(tmp_path) as (a, _), agents_of(a) as [agent]:
        state = await state_of(a, agent)
        async with serving(FakeEngine(), tmp_path / "lone") as lone:
            answer = await lone.http.post(PATH, json=state)
            assert lone.server.sessions.num_open == 0
    assert answer.json()["errors"][0]["location"] == "source"


async def test_session_without_room_or_adapter_is_refused(tmp_path: Path) -> None:
    async with replicas(tmp_path, sessions={"max_open": 1}) as (a, b), agents_of(a) as [agent]:
        state = await state_of(a, agent)
        state["group"]["options"]["adapter"] = "unknown"
        unknown = await b.http.post(PATH, json=state)
        async with agents_of(b):
            full = await b.http.post(PATH, json=await state_of(a, agent))
    assert (unknown.status_code, full.status_code) == (404, 503)


async def test_session_is_refused_if_a_drain_begins_while_it_is_received(tmp_path: Path) -> None:
    registry = HeldRegistry()
    async with replicas(tmp_path, 2, registry) as (a, b), agents_of(a) as [agent]:
        sending = asyncio.create_task(b.http.post(PATH, json=await state_of(a, agent)))
        await registry.requested.wait()
        await drain(b)
        registry.gate.set()
        answer = await sending
        assert b.server.sessions.num_open == 0
    assert (answer.status_code, answer.json()["code"]) == (503, "draining")


async def test_move_that_is_refused_for_memory_drops_no_result(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_bytes": 30_000}
    async with (
        replicas(tmp_path, sessions=limits) as (a, b),
        agents_of(a) as [large],
        agents_of(b, n=2),
        agents_of(b) as [ended],
    ):
        await get(b, f"/v1/sessions/{ended.id}", method="DELETE")
        await call(large, [{"role": "user", "content": "long" * 100}])
        answer = await b.http.post(PATH, json=await state_of(a, large))
        kept = await get(b, f"/v1/sessions/{ended.id}")
    assert (answer.status_code, kept["state"]) == (503, "cancelled")


async def test_only_replicas_may_send_sessions(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", one="rollout", two="replica")
    settings: dict[str, Any] = {"server": {"keys_file": tmp_path / "keys"}}
    async with replicas(tmp_path, 1, **settings) as [a]:
        requests = [
            (await a.http.post(PATH, json={}, headers=key)).status_code
            for key in ({}, bearer(keys["one"]), bearer(keys["two"]))
        ]
        returns = [
            (await a.http.delete(f"{PATH}/x", headers=key)).status_code
            for key in ({}, bearer(keys["one"]), bearer(keys["two"]))
        ]
    assert (requests, returns) == ([401, 403, 422], [401, 403, 404])
