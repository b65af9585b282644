"""Draft history of whole replicas that share a Redis server, also while the server fails."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from redis import Redis

from tests.cluster import fleet
from tests.fake_engine import FakeEngine
from tests.redis_server import RedisServer, redis_server
from tests.service.sessions.agents import Trainer
from tests.service.test_rollouts import body, group
from tests.serving import Served, serving, settings_for

pytestmark = pytest.mark.slow

LABEL = "ab" * 16
PROMPT = group(1, 2, 3, n=2)
SAMPLES = [([1, 2, 3], [3, 4, 5, 6]), ([1, 2, 3], [3, 4, 5, 6])]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


def engine(label: str | None = LABEL) -> FakeEngine:
    made = FakeEngine()
    made.draft_store_label = label
    return made


def sections(redis: RedisServer, **changes: Any) -> dict[str, dict[str, Any]]:
    return {
        "cluster": {"redis_url": redis.url, "call_seconds": 5.0, "expire_seconds": 30.0},
        "draft_history": {"enabled": True, "interval_seconds": 0.02, **changes},
        "weights": {"catch_up_seconds": 0.1},
    }


@pytest.fixture
async def pair(redis: RedisServer, tmp_path: Path) -> AsyncIterator[list[Served]]:
    async with fleet(tmp_path, [engine(), engine()], lambda: None, **sections(redis)) as replicas:
        yield replicas


def received(served: Served) -> list[tuple[list[int], list[int]]]:
    assert isinstance(served.server.engine, FakeEngine)
    return [
        (texts.prompt.tolist(), response.tolist())
        for texts in served.server.engine.draft_texts
        for response in texts.responses
    ]


async def sample(served: Served) -> None:
    answer = await served.http.post("/v1/rollouts", json=body(PROMPT))
    assert answer.status_code == 200


async def receives(served: Served, number: int) -> None:
    async with asyncio.timeout(30):
        while len(received(served)) < number:
            await asyncio.sleep(0.01)


async def metric(served: Served, name: str) -> float:
    text = (await served.http.get("/metrics")).text
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " "))


async def until(served: Served, name: str, *, at_least: float) -> None:
    async with asyncio.timeout(30):
        while await metric(served, name) < at_least:
            await asyncio.sleep(0.01)


async def test_samples_of_each_replica_reach_the_other(pair: list[Served]) -> None:
    one, other = pair
    await sample(one)
    await receives(other, 2)
    await sample(other)
    await receives(one, 2)
    assert received(one) == received(other) == SAMPLES
    assert await metric(one, 'coppice_draft_history_samples_total{direction="sent"}') == 2
    assert await metric(one, 'coppice_draft_history_samples_total{direction="received"}') == 2
    await until(one, "coppice_draft_history_up", at_least=1)


async def test_new_replica_receives_earlier_samples(
    redis: RedisServer, pair: list[Served], tmp_path: Path
) -> None:
    await sample(pair[0])
    await receives(pair[1], 2)
    async with fleet(tmp_path / "new", [engine()], lambda: None, **sections(redis)) as [new]:
        await receives(new, 2)
        assert received(new) == SAMPLES


async def test_replica_of_another_model_receives_nothing(
    redis: RedisServer, tmp_path: Path
) -> None:
    engines = [engine(), engine("cd" * 16), engine()]
    async with fleet(tmp_path, engines, lambda: None, **sections(redis)) as [one, foreign, other]:
        await sample(one)
        await receives(other, 2)
        await until(foreign, "coppice_draft_history_up", at_least=1)
        assert received(foreign) == []


async def test_sessions_and_salted_requests_stay_on_their_replica(
    redis: RedisServer, pair: list[Served]
) -> None:
    one, other = pair
    salted = {"prompt": [9, 9], "max_tokens": 4, "cache_salt": "mine", "model": "fake"}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{one.url}/v1/completions", json=salted)
        assert answer.status_code == 200, answer.text
        [agent] = await Trainer(one, one.server.engine, http).create()
        assert (await agent.chat(max_tokens=4)).status_code == 200
    await sample(one)
    await receives(other, 2)
    assert received(other) == SAMPLES
    with Redis(port=redis.port) as client:
        keys = redis.keys()
        [key] = [key for key in keys if "draft-history" in key]
        assert client.xlen(key) == 1


@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_rollouts_continue_without_redis_and_samples_follow(
    redis: RedisServer, tmp_path: Path, how: str
) -> None:
    settings = sections(redis)
    settings["cluster"] |= {"call_seconds": 0.2}
    async with fleet(tmp_path, [engine(), engine()], lambda: None, **settings) as [one, other]:
        redis.kill() if how == "kill" else redis.pause()
        try:
            for _ in range(5):
                await sample(one)
            await until(one, "coppice_draft_history_failures_total", at_least=2)
            assert await metric(one, "coppice_draft_history_up") == 0
        finally:
            redis.start() if how == "kill" else redis.resume()
        await receives(other, 10)
        await until(one, "coppice_draft_history_up", at_least=1)


async def test_malformed_and_foreign_entries_are_counted(
    redis: RedisServer, pair: list[Served]
) -> None:
    one, other = pair
    key = "{coppice}:draft-history:" + LABEL
    with Redis(port=redis.port) as client:
        client.xadd(key, {"replica": "x", "texts": b"x" * 100})
        client.xadd(key, {"replica": "x", "texts": b"x" * 2**20})
        client.xadd(key, {"unknown": "field"})
    await sample(one)
    await receives(other, 2)
    dropped = 'coppice_draft_history_dropped_total{reason="malformed"}'
    await until(other, dropped, at_least=3)
    assert received(other) == SAMPLES


async def test_flood_of_entries_leaves_the_server_responsive(
    redis: RedisServer, pair: list[Served]
) -> None:
    key = "{coppice}:draft-history:" + LABEL
    with Redis(port=redis.port) as client:
        for _ in range(64):
            client.xadd(key, {"replica": "x", "texts": b"x" * 2**17})
    await sample(pair[0])
    assert (await pair[1].http.get("/readyz")).status_code == 200
    await until(pair[1], 'coppice_draft_history_dropped_total{reason="malformed"}', at_least=8)


async def test_samples_are_not_shared_by_default(redis: RedisServer, tmp_path: Path) -> None:
    chosen = sections(redis) | {"draft_history": {}}
    async with fleet(tmp_path, [engine()], lambda: None, **chosen) as [one]:
        await sample(one)
        assert one.server.draft_history is None
    keys = redis.keys()
    assert not any("draft-history" in key for key in keys)


async def test_engine_without_a_draft_store_is_listed_as_off(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with fleet(tmp_path, [engine(None)], lambda: None, **sections(redis)) as [one]:
        features = (await one.http.get("/v1/status")).json()["features"]
        [found] = [each for each in features if each["name"] == "draft_history"]
        assert not found["enabled"] and "draft store" in found["reason"]


def test_sharing_requires_redis(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"draft_history\.enabled requires"):
        settings_for(tmp_path, draft_history={"enabled": True})


async def test_server_without_redis_exports_zeros(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        assert await metric(served, "coppice_draft_history_up") == 0
