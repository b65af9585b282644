"""Moves while Redis fails over or the network stalls: nothing is lost or repeated."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.cluster.in_memory_registry import InMemoryRegistry
from tests.cluster import fleet, sees
from tests.fake_engine import FakeEngine
from tests.ports import free_port
from tests.redis_server import RedisServer, redis_server
from tests.service.cluster.test_handoff import (
    ASYNC,
    LONG,
    PEERS,
    PROMPT,
    drain,
    engine_of,
    post,
    see_each_other,
    submitted,
)
from tests.service.cluster.test_handoff_outcomes import sender_of
from tests.service.test_rollouts import body, running_samples
from tests.serving import Served, serving
from tests.throttled_proxy import ThrottledProxy, throttled_proxy

pytestmark = pytest.mark.slow

TOKENS = [list(range(3, 15))] * 2
KEY = {"idempotency-key": "k"}


def with_fault(
    fault: Callable[[], None], *, is_before: bool, is_over: asyncio.Event
) -> type[httpx.AsyncClient]:
    """HTTP client of a sender; the fault happens before its request, or after the response."""

    class WithFault(httpx.AsyncClient):
        async def post(self, *args: Any, **kwargs: Any) -> httpx.Response:
            if is_before:
                await asyncio.to_thread(fault)
            response = await super().post(*args, **kwargs)
            if not is_before:
                await asyncio.to_thread(fault)
            is_over.set()
            return response

    return WithFault


@pytest.fixture
async def with_redis(tmp_path: Path) -> AsyncIterator[tuple[RedisServer, list[Served]]]:
    with redis_server(tmp_path) as redis:
        cluster = {"redis_url": redis.url, "heartbeat_seconds": 0.2, "expire_seconds": 30.0}
        cluster |= {"call_seconds": 1.0, "handoff_seconds": 30.0}
        weights = {**PEERS, "replication_seconds": 0.1}  # otherwise a start takes `expire_seconds`
        engines = [FakeEngine(instant=False) for _ in range(2)]
        async with fleet(
            tmp_path, engines, lambda: None, weights=weights, cluster=cluster
        ) as replicas:
            yield redis, replicas


async def finished(*served: Served) -> None:
    """Step all engines until they run nothing."""
    async with asyncio.timeout(30):
        while any(each.server.rollouts.num_running for each in served):
            for each in served:
                engine_of(each).step(1)
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("fault", ["restart", "pause", "flush"])
async def test_redis_that_fails_over_during_a_move_costs_no_token(
    with_redis: tuple[RedisServer, list[Served]], fault: str, is_before: bool
) -> None:
    """After a restart Redis is empty, as a replica of it that had not received the last writes."""
    redis, (a, b) = with_redis
    calling = asyncio.create_task(post(a, body(PROMPT, **LONG), **KEY))
    await running_samples(a, 2)
    engine_of(a).step(5)
    is_over = asyncio.Event()
    client = with_fault(getattr(redis, fault), is_before=is_before, is_over=is_over)
    sending = asyncio.create_task(sender_of(a, client).send_all(30))
    await is_over.wait()
    if fault == "pause":
        redis.resume()
    while len(engine_of(a).submitted) < 4 and len(engine_of(b).submitted) < 2:
        await asyncio.sleep(0.001)
    await finished(a, b)
    await sending
    answer = (await calling).json()
    assert [sample["token_ids"] for sample in answer["groups"][0]["samples"]] == TOKENS
    assert len(engine_of(a).submitted) + len(engine_of(b).submitted) == 4  # on one replica only
    for each in (a, b):
        await sees(each, 2)
    for each in (a, b):
        again = await post(each, body(PROMPT, **LONG), **KEY)
        assert again.json() == answer


@asynccontextmanager
async def over_network(
    tmp_path: Path, bytes_per_second: float, handoff_seconds: float
) -> AsyncIterator[tuple[Served, Served, ThrottledProxy]]:
    """Two replicas; the second one is reached through a throttled connection only."""
    registry, near, far = InMemoryRegistry(), free_port(), free_port()
    ports = (free_port(), near)
    advertised = (ports[0], far)
    cluster = {"handoff_seconds": handoff_seconds}
    settings: list[dict[str, Any]] = [
        {
            "weights": PEERS,
            "cluster": cluster,
            "server": {"advertised_url": f"http://127.0.0.1:{port}"},
        }
        for port in advertised
    ]
    engines = [FakeEngine(instant=False) for _ in range(2)]
    async with (
        throttled_proxy(far, near, bytes_per_second) as proxy,
        serving(engines[0], tmp_path / "a", port=ports[0], shared=registry, **settings[0]) as a,
        serving(engines[1], tmp_path / "b", port=ports[1], shared=registry, **settings[1]) as b,
    ):
        await see_each_other(a, b)
        yield a, b, proxy
        await proxy.close()  # otherwise the stop waits for the bytes that it still passes on


async def test_move_over_a_slow_network_succeeds_in_time(tmp_path: Path) -> None:
    async with over_network(tmp_path, 20_000, 60.0) as (a, b, _):
        accepted = await a.http.post("/v1/rollouts", json=body(PROMPT, **LONG), headers=ASYNC)
        await running_samples(a, 2)
        engine_of(a).step(5)
        await drain(a)
        await running_samples(b, 2)
        engine_of(b).step(7)
        place = accepted.headers["location"]
        answer = await a.http.get(place, params={"wait": 5}, follow_redirects=True)
    assert [each["token_ids"] for each in answer.json()["groups"][0]["samples"]] == TOKENS


async def test_rollout_continues_here_if_the_network_is_too_slow_for_its_state(
    tmp_path: Path,
) -> None:
    async with over_network(tmp_path, 200, 1.0) as (a, b, _):
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG), **KEY))
        await running_samples(a, 2)
        engine_of(a).step(5)
        draining = asyncio.create_task(drain(a))
        await submitted(a, 4)
        await finished(a)
        answer = (await calling).json()
        await draining
        assert (engine_of(b).submitted, b.server.admission.num_samples) == ([], 0)
    assert [each["token_ids"] for each in answer["groups"][0]["samples"]] == TOKENS


async def test_caller_gets_one_result_if_the_network_stalls_after_the_request(
    tmp_path: Path,
) -> None:
    """The other replica runs a copy, which is cancelled when the network works again, or ends."""
    async with over_network(tmp_path, 1e6, 2.0) as (a, b, proxy):
        calling = asyncio.create_task(post(a, body(PROMPT, **LONG), **KEY))
        await running_samples(a, 2)
        engine_of(a).step(5)
        proxy.responses.clear()
        draining = asyncio.create_task(drain(a))
        await submitted(b, 2)
        await submitted(a, 4)
        proxy.responses.set()
        retry = asyncio.create_task(post(b, body(PROMPT, **LONG), **KEY))
        await finished(a, b)
        answer = (await calling).json()
        await draining
        assert (await retry).json() == answer
        assert b.server.rollouts.num_running == 0
    assert [each["token_ids"] for each in answer["groups"][0]["samples"]] == TOKENS
