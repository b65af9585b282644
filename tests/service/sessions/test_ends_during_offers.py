"""Sessions that end while their group is offered to another replica are streamed once."""

import asyncio
from pathlib import Path

import pytest

from coppice.wire.sessions import SessionFinishRequest
from service.cluster.in_memory_registry import InMemoryRegistry
from tests.service.cluster.test_handoff import see_each_other
from tests.service.cluster.test_handoff_faults import peer
from tests.service.sessions.agents import HELLO
from tests.service.sessions.fleets import (
    HeldRegistry,
    agents_of,
    call,
    drain,
    get,
    records,
    replicas,
)
from tests.service.sessions.test_session_handoff_faults import state_of
from tests.service.test_rollouts import running_samples

pytestmark = pytest.mark.slow


async def test_session_that_ends_before_its_group_is_accepted_is_streamed_by_the_receiver(
    tmp_path: Path,
) -> None:
    registry = HeldRegistry()
    async with (
        replicas(tmp_path, 2, registry) as (a, b),
        agents_of(a, n=2, group="g") as (one, two),
    ):
        draining = asyncio.create_task(drain(a))
        await registry.requested.wait()
        await get(a, f"/v1/sessions/{two.id}/finish", method="POST", json={"reward": 1.0})
        registry.gate.set()
        await draining
        await get(b, f"/v1/sessions/{one.id}", method="DELETE")
        found = await records(b, f"{one.id.partition('.')[0]}.g")
    assert [each["session"]["id"] for each in found[:-1]] == [two.id, one.id]
    assert found[-1] == {"type": "end", "num_sessions": 2, "num_finished": 1, "num_dropped": 0}


async def test_session_that_ends_during_an_offer_without_success_is_streamed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.handoff.sender.OFFER_SECONDS", 0.5)
    registry = InMemoryRegistry()
    async with (
        replicas(tmp_path, 1, registry) as [a],
        agents_of(a, n=2, group="g") as (one, two),
        peer(registry, "silent"),
    ):
        await see_each_other(a)
        moving = a.server.sessions.get(one.id, owner="local")
        draining = asyncio.create_task(drain(a))
        while not moving.is_moving:
            await asyncio.sleep(0.001)
        await get(a, f"/v1/sessions/{two.id}", method="DELETE")
        assert a.server.sessions.get(two.id, owner="local").sequence is None
        await get(a, f"/v1/sessions/{one.id}", method="DELETE")
        found = await records(a, f"{one.id.partition('.')[0]}.g")
        await draining
    assert [each["session"]["id"] for each in found[:-1]] == [two.id, one.id]


async def test_session_whose_last_call_is_aborted_counts_as_finished_only_once(
    tmp_path: Path,
) -> None:
    async with replicas(tmp_path, instant=False) as (a, _), agents_of(a, n=2) as (busy, idle):
        calling = asyncio.create_task(call(busy, HELLO))
        await running_samples(a, 1)
        sessions = a.server.sessions
        session = sessions.get(busy.id, owner="local")
        finishing = asyncio.create_task(sessions.finish(session, SessionFinishRequest()))
        while session.is_open:
            await asyncio.sleep(0)
        assert not session.ended.is_set()
        group = (await state_of(a, idle))["group"]
        await finishing
        await asyncio.gather(calling, return_exceptions=True)
    assert (group["remaining_ids"], group["num_finished"]) == ([busy.id], 0)
