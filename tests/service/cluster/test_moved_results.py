"""Results that callers are to fetch are offered to other replicas as long as a drain lasts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.cluster.in_memory import InMemoryRegistry
from service.cluster.registry import RegistryUnavailable
from tests.service.cluster.test_moves import (
    ASYNC,
    LONG,
    PROMPT,
    drain,
    engine_of,
    replicas,
    see_each_other,
    submitted,
)
from tests.service.test_rollouts import body, running_samples
from tests.serving import Served

pytestmark = pytest.mark.slow


class Interrupted(InMemoryRegistry):
    """Registry whose transfers fail before it `is_available`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_available = False
        self.num_failed = 0

    async def transfer(
        self, claim_key: str, source: str, replica_id: str, *, ttl_seconds: float
    ) -> str:
        if self.is_available:
            return await super().transfer(claim_key, source, replica_id, ttl_seconds=ttl_seconds)
        self.num_failed += 1
        raise RegistryUnavailable("down")


@asynccontextmanager
async def pair(tmp_path: Path, shared: InMemoryRegistry) -> AsyncIterator[list[Served]]:
    async with replicas(tmp_path, shared, cluster={"move_seconds": 0.5}) as served:
        await see_each_other(*served)
        yield served


async def submit(served: Served) -> str:
    """Path of an asynchronous rollout whose samples are running."""
    request = body(PROMPT, **LONG)
    accepted = await served.http.post("/v1/rollouts", json=request, headers=ASYNC)
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
    monkeypatch.setattr("service.moves.sender.RETRY_SECONDS", 0.05)
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
