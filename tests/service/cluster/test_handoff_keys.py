"""Keys of a rollout that moves: retries and readers find it, or are asked to repeat the request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.membership import ClusterMembership
from tests.service.cluster.test_handoff import (
    ASYNC,
    LONG,
    PROMPT,
    drain,
    engine_of,
    replicas,
    see_each_other,
)
from tests.service.cluster.test_handoff_results import GONE, KEY, ended, set_holder, submit
from tests.service.test_rollouts import body
from tests.serving import Served

pytestmark = pytest.mark.slow

CLUSTER = {"handoff_seconds": 0.5}


async def test_key_goes_to_the_replica_whose_retry_has_started_another_rollout(
    tmp_path: Path,
) -> None:
    registry = InMemoryRegistry()
    async with replicas(tmp_path, registry, cluster=CLUSTER) as (a, b):
        await see_each_other(a, b)
        place = await submit(a, **KEY)
        (registry_key,) = a.server.idempotency_keys.held
        b.server.cluster._on_unavailable("down")
        assert await submit(b, **KEY) != place
        await see_each_other(a, b)
        assert await registry.holder(registry_key) == a.server.cluster.own_id
        for each in (a, b):
            await ended(each)
        await drain(a)
        assert await registry.holder(registry_key) == b.server.cluster.own_id


async def test_rollout_does_not_leave_its_key_to_a_replica_that_may_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage of the registry, replicas that are not registered may still run."""
    async with replicas(tmp_path, InMemoryRegistry(), 3, cluster=CLUSTER) as (a, b, c):
        await see_each_other(a, b, c)
        rollout_id = (await submit(a, **KEY)).rpartition("/")[2]
        await set_holder(a, GONE)
        await ended(a)
        with monkeypatch.context() as patched:
            patched.setattr(ClusterMembership, "is_settled", property(lambda _: False))
            draining = asyncio.create_task(drain(a))
            await asyncio.sleep(0.5)
            assert not (b.server.rollouts.has(rollout_id) or c.server.rollouts.has(rollout_id))
        await draining
        other = c if b.server.rollouts.has(rollout_id) else b
        again = await other.http.post("/v1/rollouts", json=body(PROMPT, **LONG), headers=KEY)
        assert again.is_redirect


@asynccontextmanager
async def taking_over_keys(b: Served) -> AsyncIterator[asyncio.Event]:
    """Context manager in which the transfer of a second key, that of a caller, does not end.

    The event is set when it has begun.
    """
    transfers, has_begun, may_go_on = b.server.idempotency_keys, asyncio.Event(), asyncio.Event()
    transfer, keys = transfers.try_to_take_over, list[str]()

    async def slow_transfer(registry_key: str, source: str) -> bool:
        keys.append(registry_key)
        if len(keys) == 2:
            has_begun.set()
            await may_go_on.wait()
        return await transfer(registry_key, source)

    transfers.try_to_take_over = slow_transfer  # type: ignore[method-assign]
    try:
        yield has_begun
    finally:
        transfers.try_to_take_over = transfer  # type: ignore[method-assign]
        may_go_on.set()


async def test_retry_and_reader_of_a_rollout_that_arrives_may_repeat_the_request(
    tmp_path: Path,
) -> None:
    """Also if the replica that has given it its id has left."""
    registry = InMemoryRegistry()
    async with replicas(tmp_path, registry, cluster={"handoff_seconds": 5}) as (a, b):
        await see_each_other(a, b)
        place = await submit(a, **KEY)
        async with taking_over_keys(b) as has_begun:
            draining = asyncio.create_task(drain(a))
            await has_begun.wait()
            b.server.cluster.view.replicas.pop(a.server.cluster.own_id)
            headers = {**KEY, **ASYNC}
            retry = await b.http.post("/v1/rollouts", json=body(PROMPT, **LONG), headers=headers)
            read = await b.http.get(place)
        assert (retry.status_code, retry.json()["code"]) == (409, "idempotency_in_progress")
        assert (read.status_code, read.json()["code"]) == (503, "not_ready")
        assert int(retry.headers["retry-after"]) > 0 and int(read.headers["retry-after"]) > 0
        engine_of(b).instant = True
        while not b.server.rollouts.has(place.rpartition("/")[2]):
            await asyncio.sleep(0.001)
        engine_of(b).step(12)
        await draining
        assert (await b.http.get(place)).json()["outcome"] == "done"
