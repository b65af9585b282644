"""Results that callers are to fetch leave a draining replica, also after the registry failed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from service.cluster.idempotency_claim import IdempotencyClaim
from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import RegistryUnavailable, Replica
from tests.service.cluster.test_handoff import (
    ASYNC,
    LONG,
    PROMPT,
    drain,
    engine_of,
    offered_state,
    replicas,
    see_each_other,
    submitted,
)
from tests.service.test_rollouts import body, running_samples
from tests.serving import Served

pytestmark = pytest.mark.slow

KEY = {"idempotency-key": "k"}
GONE = "c" * 12
"""Id of a replica that is not registered, unless a test registers it."""
OTHER_URL = "http://127.0.0.1:1"


class Interrupted(InMemoryRegistry):
    """Registry whose transfers fail before it `is_available`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_available = False
        self.num_failed = 0

    async def claim(
        self, registry_key: str, replica_id: str, *, source: str | None = None, **options: Any
    ) -> str:
        if source is None or self.is_available:
            return await super().claim(registry_key, replica_id, source=source, **options)
        self.num_failed += 1
        raise RegistryUnavailable("down")


@asynccontextmanager
async def pair(tmp_path: Path, shared: InMemoryRegistry) -> AsyncIterator[list[Served]]:
    async with replicas(tmp_path, shared, cluster={"handoff_seconds": 0.5}) as served:
        await see_each_other(*served)
        yield served


async def submit(served: Served, **headers: str) -> str:
    """Path of an asynchronous rollout whose samples are running."""
    request = body(PROMPT, **LONG)
    accepted = await served.http.post("/v1/rollouts", json=request, headers={**ASYNC, **headers})
    await running_samples(served, 2)
    return accepted.headers["location"]


async def ended(served: Served) -> None:
    engine_of(served).step(12)
    while served.server.rollouts.num_running:
        await asyncio.sleep(0.001)


async def check_moved(b: Served, place: str) -> None:
    answer = (await b.http.get(place)).json()
    assert answer["outcome"] == "done"
    assert [len(each["token_ids"]) for each in answer["groups"][0]["samples"]] == [12, 12]


async def test_refused_result_is_offered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.handoff.sender.RETRY_SECONDS", 0.05)
    shared = Interrupted()
    async with pair(tmp_path, shared) as (a, b):
        place = await submit(a)
        await ended(a)
        draining = asyncio.create_task(drain(a))
        async with asyncio.timeout(30):
            while shared.num_failed < 3:
                await asyncio.sleep(0.001)
        shared.is_available = True
        await draining
        await check_moved(b, place)


async def test_result_of_a_rollout_that_has_not_moved_is_moved_at_its_end(tmp_path: Path) -> None:
    shared = Interrupted()
    async with pair(tmp_path, shared) as (a, b):
        place = await submit(a)
        draining = asyncio.create_task(drain(a))
        await submitted(a, 4)  # it continues
        shared.is_available = True
        await asyncio.sleep(0.6)  # the time for moves of running rollouts
        await ended(a)
        await draining
        await check_moved(b, place)
        assert not engine_of(b).submitted


async def set_holder(served: Served, replica_id: str) -> None:
    """Let the registry name another holder of all keys of a replica, as after a loss of Redis."""
    registry = served.server.cluster.registry
    for key in served.server.idempotency_keys.held:
        await registry.release(key, served.server.cluster.own_id)
        await registry.claim(key, replica_id, ttl_seconds=600, allow_takeover=False)


async def drained(a: Served, b: Served, *, has_ended: bool) -> None:
    """Drain a replica with one rollout, which may end before that."""
    if has_ended:
        await ended(a)
    await drain(a)
    if not has_ended:
        await running_samples(b, 2)
        await ended(b)


@pytest.mark.parametrize("has_ended", [True, False])
async def test_key_of_a_replica_that_has_left_is_taken_over(
    tmp_path: Path, has_ended: bool
) -> None:
    async with pair(tmp_path, InMemoryRegistry()) as (a, b):
        place = await submit(a, **KEY)
        await set_holder(a, GONE)
        await drained(a, b, has_ended=has_ended)
        await check_moved(b, place)
        again = await b.http.post("/v1/rollouts", json=body(PROMPT, **LONG), headers=KEY)
        assert again.headers["coppice-rollout-id"] == place.rpartition("/")[2]


@pytest.mark.parametrize("has_ended", [True, False])
async def test_rollout_moves_without_its_key_if_a_retry_has_started_another(
    tmp_path: Path, has_ended: bool
) -> None:
    async with pair(tmp_path, InMemoryRegistry()) as (a, b):
        place = await submit(a, **KEY)
        (key,) = a.server.idempotency_keys.held
        await a.server.cluster.registry.release(key, a.server.cluster.own_id)
        other = await submit(b, **KEY)
        await ended(b)
        assert other != place
        await drained(a, b, has_ended=has_ended)
        for each in (place, other):
            await check_moved(b, each)
        again = await b.http.post("/v1/rollouts", json=body(PROMPT, **LONG), headers=KEY)
        assert again.headers["coppice-rollout-id"] == other.rpartition("/")[2]
        assert await b.server.cluster.registry.holder(key) == b.server.cluster.own_id


async def test_rollout_moves_without_its_key_if_a_third_replica_holds_it(tmp_path: Path) -> None:
    registry = InMemoryRegistry()
    async with pair(tmp_path, registry) as (a, b):
        place = await submit(a, **KEY)
        entry = Replica(id=GONE, url=OTHER_URL, state="draining", version="v0", sequence=0)
        await registry.beat(entry, ttl_seconds=60)
        await set_holder(a, GONE)
        (key,) = a.server.idempotency_keys.held
        await drained(a, b, has_ended=True)
        await check_moved(b, place)
        assert await registry.holder(key) == GONE
        assert key not in b.server.idempotency_keys.held


async def test_rollout_is_refused_while_a_request_with_its_key_starts(tmp_path: Path) -> None:
    async with pair(tmp_path, InMemoryRegistry()) as (a, b):
        state = offered_state(a) | {"key": {"key": "k", "fingerprint": "0" * 64}}
        claim = IdempotencyClaim("local", "k", bytes(32))
        b.server.idempotency_keys.claim(claim)
        response = await b.http.post("/v1/handoff/rollouts", json=state)
        assert (response.status_code, response.json()["code"]) == (503, "not_ready")
        assert (len(b.server.idempotency_keys), b.server.admission.num_samples) == (1, 0)
