"""A rollout that is being moved runs on exactly one replica, whatever happens meanwhile."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from coppice.wire.columns.token_columns import TokenColumns, TokenLists
from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import RegistryUnavailable, Replica
from service.config.allowed_peers import Peers
from service.handoff.rollouts import Results, RunningRollouts
from service.handoff.sender import CONCURRENT_OFFERS, HandoffSender, refusal_of
from service.rollouts.groups.flat_sampler import FlatSampler
from service.rollouts.groups.group import Group
from service.rollouts.groups.options import GroupOptions
from service.rollouts.rollout import Rollout
from tests.fake_engine import FakeEngine
from tests.service.cluster.test_handoff import (
    LONG,
    PROMPT,
    engine_of,
    post,
    replicas,
    see_each_other,
)
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served

pytestmark = pytest.mark.slow

SHORT_SECONDS = 2.0
OTHER_ID = "c" * 12


class SlowToClose(httpx.AsyncClient):
    """HTTP client that is closed only after the time for moves has passed."""

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(SHORT_SECONDS)
        await self.aclose()


class FailsToOpen(httpx.AsyncClient):
    async def __aenter__(self) -> Self:
        raise ValueError("unexpected")


def blocked(gate: asyncio.Event) -> type[httpx.AsyncClient]:
    """HTTP client that sends nothing before the gate is set."""

    class Blocked(httpx.AsyncClient):
        async def post(self, *args: Any, **kwargs: Any) -> httpx.Response:
            await gate.wait()
            return await super().post(*args, **kwargs)

    return Blocked


class PresentResults(Results):
    """Results that are here now, each of which is offered once."""

    def is_over(self) -> bool:
        return True


class RolloutSender:
    """Sender of the rollouts and results of a replica, apart from that of its drain."""

    def __init__(self, served: Served, client: type[httpx.AsyncClient], max_bytes: int) -> None:
        server, peers = served.server, Peers(["http://127.0.0.1:*"], None)
        of_rollouts = server.handoff.rollouts
        self._sender = HandoffSender(
            of_rollouts.cluster,
            peers,
            server.metrics.cluster,
            max_bytes=max_bytes,
            client=client,
        )
        handoff = replace(of_rollouts, candidates=self._sender.candidates)
        self._running = RunningRollouts(handoff=handoff)
        self._results = PresentResults(handoff=handoff)

    async def send_all(self, seconds: float) -> None:
        await self._sender.send_all(self._running, seconds)
        await self._sender.send_all(self._results, seconds)


def sender_of(
    served: Served,
    client: type[httpx.AsyncClient] = httpx.AsyncClient,
    max_bytes: int = 2**20,
) -> RolloutSender:
    return RolloutSender(served, client, max_bytes)


async def resubmitted(a: Served, number: int) -> None:
    """Wait until suspended samples continue on their replica; `send_all` waits for their end."""
    while len(engine_of(a).submitted) < 2 * number:
        await asyncio.sleep(0.001)


async def ends_here(a: Served, sender: RolloutSender, num_rollouts: int = 2) -> None:
    """Assert that rollouts that the sender cannot move continue, and end with all tokens."""
    calling = [asyncio.create_task(post(a, body(PROMPT, **LONG))) for _ in range(num_rollouts)]
    await running_samples(a, 2 * num_rollouts)
    engine_of(a).step(5)
    sending = asyncio.create_task(sender.send_all(30))
    await resubmitted(a, 2 * num_rollouts)
    engine_of(a).step(7)
    for each in calling:
        samples = (await each).json()["groups"][0]["samples"]
        assert [sample["token_ids"] for sample in samples] == [list(range(3, 15))] * 2
    await sending


async def test_accepted_rollout_runs_once_if_the_time_ends_then(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG)))
        await running_samples(a, 2)
        await sender_of(a, SlowToClose).send_all(SHORT_SECONDS)
        await running_samples(b, 2)
        assert len(engine_of(a).submitted) == 2
        engine_of(b).step(12)
        assert (await calling).json()["outcome"] == "done"


@pytest.mark.parametrize("path", ["\x01", "a" * 70_000])
async def test_replica_with_an_invalid_url_harms_no_rollout(tmp_path: Path, path: str) -> None:
    registry = InMemoryRegistry()
    async with replicas(tmp_path, registry, 1) as (a,):
        url = f"http://127.0.0.1:8000/{path}"
        entry = Replica(id=OTHER_ID, url=url, state="serving", version="v0", sequence=0)
        await registry.beat(entry, ttl_seconds=60)
        await see_each_other(a)
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG)))
        await running_samples(a, 2)
        await sender_of(a).send_all(30)
        assert len(engine_of(a).submitted) == 2
        engine_of(a).step(12)
        assert (await calling).json()["outcome"] == "done"


async def test_unexpected_error_in_a_move_keeps_the_rollouts(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        await ends_here(a, sender_of(a, FailsToOpen))
        assert engine_of(b).submitted == []


async def test_rollout_is_suspended_only_when_its_turn_has_come(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        calling = [asyncio.create_task(post(a, body(PROMPT, **LONG))) for _ in range(12)]
        await running_samples(a, 24)
        gate = asyncio.Event()
        sending = asyncio.create_task(sender_of(a, blocked(gate)).send_all(30))
        while len(engine_of(a).running) > 24 - 2 * CONCURRENT_OFFERS:
            await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0.001)
            assert len(engine_of(a).running) == 24 - 2 * CONCURRENT_OFFERS
        gate.set()
        await sending
        await running_samples(b, 24)
        engine_of(b).step(12)
        answers = [(await each).json() for each in calling]
        assert all(answer["outcome"] == "done" for answer in answers)


async def test_stream_of_a_rollout_that_stays_here_has_each_token_once(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        received: list[int] = []
        request = body(group(1, 2, 3), **LONG, stream=True, stream_tokens=True)

        async def read() -> None:
            async with a.http.stream(
                "POST", "/v1/rollouts", json=request, headers={"idempotency-key": "k"}
            ) as response:
                async for line in response.aiter_lines():
                    record = json.loads(line)
                    if record["type"] == "tokens":
                        assert record["start"] == len(received)
                        received.extend(record["token_ids"])

        reading = asyncio.create_task(read())
        await running_samples(a, 1)
        engine_of(a).step(5)
        while len(received) < 5:
            await asyncio.sleep(0.001)
        (sample,) = engine_of(a).running.values()
        sample.token_versions += ["v0"] * 2  # sampled, and not delivered before the suspension
        sending = asyncio.create_task(sender_of(a, FailsToOpen).send_all(30))
        await resubmitted(a, 1)
        engine_of(a).step(2)
        while len(received) < 9:
            await asyncio.sleep(0.001)
        engine_of(a).step(3)
        await asyncio.gather(reading, sending)
        assert received == list(range(3, 15))


async def test_cancellation_of_a_suspended_group_is_not_lost_when_it_continues() -> None:
    tokens: TokenLists = TokenColumns(token_ids=[1, 2], logprobs=[-1.0] * 2, versions=())
    before = Group(options=GroupOptions(), sampler=FlatSampler(), suspended={0: tokens})
    before.end_reason = "suspended"
    rollout = Rollout("1", [before], detached=True)
    await rollout.end(FakeEngine(), "cancelled")
    rollout._resume_groups()
    [after] = rollout.groups
    assert after is not before and after.end_reason == "cancelled"


def responds_late(
    received: asyncio.Event, gate: asyncio.Event, *, is_lost: bool
) -> type[httpx.AsyncClient]:
    """HTTP client whose responses arrive when the gate is set, or are lost then."""

    class RespondsLate(httpx.AsyncClient):
        async def post(self, *args: Any, **kwargs: Any) -> httpx.Response:
            response = await super().post(*args, **kwargs)
            received.set()
            await gate.wait()
            if is_lost:
                raise httpx.ReadError("lost")
            return response

    return RespondsLate


@pytest.mark.parametrize("by_key", [True, False])
async def test_callers_of_a_cancelled_copy_get_the_result_of_the_source(
    tmp_path: Path, by_key: bool
) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        request, key = body(PROMPT, **LONG), {"idempotency-key": "k"}
        calling = asyncio.create_task(post(a, request, **key))
        await running_samples(a, 2)
        engine_of(a).step(5)
        received, gate = asyncio.Event(), asyncio.Event()
        sender = sender_of(a, responds_late(received, gate, is_lost=True))
        sending = asyncio.create_task(sender.send_all(30))
        await received.wait()
        (copy,) = b.server.rollouts.in_flight()
        place = f"/v1/rollouts/{copy.id}"
        if by_key:
            at_b = asyncio.create_task(post(b, request, **key))
        else:
            waiting = b.http.get(place, params={"wait": 60}, follow_redirects=True)
            at_b = asyncio.create_task(waiting)
        await asyncio.sleep(0.1)
        gate.set()
        await resubmitted(a, 2)
        late = asyncio.create_task(post(b, request, **key))
        await asyncio.sleep(0.1)
        engine_of(a).step(7)
        answer = (await calling).json()
        await sending
        assert (await at_b).json() == (await late).json() == answer
        found = await b.http.get(place, follow_redirects=True)
        assert found.json() == answer
        assert answer["outcome"] == "done"
        assert len(b.server.idempotency_keys) == 0
        assert all(answer["id"] != each.id for each in b.server.rollouts._results.list())


class LosesTransfers(InMemoryRegistry):
    """Registry whose transfers are executed, but whose responses are lost."""

    async def claim(
        self, registry_key: str, replica_id: str, *, source: str | None = None, **options: Any
    ) -> str:
        holder = await super().claim(registry_key, replica_id, source=source, **options)
        if source is None:
            return holder
        raise RegistryUnavailable("lost")


async def test_keys_whose_transfer_has_an_unknown_outcome_are_taken_back(tmp_path: Path) -> None:
    registry = LosesTransfers()
    async with replicas(tmp_path, registry) as (a, b):
        await see_each_other(a, b)
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG), **{"idempotency-key": "k"}))
        await running_samples(a, 2)
        sending = asyncio.create_task(sender_of(a).send_all(30))
        await resubmitted(a, 2)
        await see_each_other(b)
        held = {key: entry.replica_id for key, entry in registry._claims.items()}
        (claim,) = a.server.idempotency_keys.held
        assert held == {claim: a.server.cluster.own_id}
        engine_of(a).step(12)
        assert (await calling).json()["outcome"] == "done"
        await sending


async def test_rollout_that_is_cancelled_during_the_request_ends_on_both(tmp_path: Path) -> None:
    async with replicas(tmp_path, InMemoryRegistry()) as (a, b):
        await see_each_other(a, b)
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG), **{"idempotency-key": "k"}))
        await running_samples(a, 2)
        (rollout,) = a.server.rollouts.in_flight()
        received, gate = asyncio.Event(), asyncio.Event()
        sender = sender_of(a, responds_late(received, gate, is_lost=False))
        sending = asyncio.create_task(sender.send_all(30))
        await received.wait()
        await a.server.rollouts.cancel(rollout)
        gate.set()
        await sending
        assert (await calling).json()["outcome"] == "cancelled"
        while b.server.rollouts.num_running or engine_of(b).running:
            await asyncio.sleep(0.001)
        assert len(b.server.idempotency_keys) == 0


class CancelsAtTheSource(httpx.AsyncClient):
    """HTTP client that sends no offers, and whose cancellations reach the sender itself."""

    own_url = ""
    num_offers = 0
    statuses: list[int]

    async def post(self, *args: Any, **kwargs: Any) -> httpx.Response:
        type(self).num_offers += 1
        raise httpx.ReadError("lost")

    async def delete(self, url: Any, **kwargs: Any) -> httpx.Response:
        path = httpx.URL(url).path
        response = await super().delete(f"{self.own_url}{path}", **kwargs)
        self.statuses.append(response.status_code)
        return response


async def test_cancellation_that_reaches_the_source_does_not_end_the_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source has itself received the rollout from a third replica."""
    monkeypatch.setattr("service.handoff.sender.CANCEL_SECONDS", 30.0)
    async with replicas(tmp_path, InMemoryRegistry(), 2) as (a, b):
        await see_each_other(a, b)
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG)))
        await running_samples(a, 2)
        engine_of(a).step(5)
        await sender_of(a).send_all(30)
        await running_samples(b, 2)

        class Client(CancelsAtTheSource):
            own_url = str(b.http.base_url).rstrip("/")
            statuses: list[int] = []

        sending = asyncio.create_task(sender_of(b, Client).send_all(30))
        await resubmitted(b, 2)
        assert Client.statuses == [404]
        engine_of(b).step(7)
        samples = (await calling).json()["groups"][0]["samples"]
        assert [sample["token_ids"] for sample in samples] == [list(range(3, 15))] * 2
        await sending
        assert Client.statuses == [404] * Client.num_offers, (
            "of its result, if it was not fetched yet"
        )


def test_refusal_is_logged_with_its_problem() -> None:
    problem = {"code": "overloaded", "title": "t", "status": 503, "detail": "no room"}
    refused = httpx.Response(503, json={"type": "about:blank", **problem})
    assert refusal_of(refused) == "503 overloaded (no room)"
    plain = httpx.Response(503, json={"type": "about:blank", **problem, "detail": None})
    assert refusal_of(plain) == "503 overloaded (t)"
    assert refusal_of(httpx.Response(404, text="<html>")) == "404"
