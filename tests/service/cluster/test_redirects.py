"""Two replicas with one cluster registry: each redirects to the other's resources."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import new_handle_id, new_replica_id, new_rollout_id
from tests.cluster import fleet, replica
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer, write_keys
from tests.service.prompt_kv.export_requests import export_handle
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import Served, serving

pytestmark = pytest.mark.slow

PROMPT = group(1, 2, 3, n=2)
ASYNC = {"prefer": "respond-async"}


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[list[Served]]:
    shared = InMemoryRegistry()
    engines = [FakeEngine(instant=False, prompt_kv=True) for _ in "ab"]
    async with fleet(tmp_path, engines, lambda: shared) as replicas:
        yield replicas


def engine_of(served: Served) -> FakeEngine:
    engine = served.server.engine
    assert isinstance(engine, FakeEngine)
    return engine


async def submitted(served: Served) -> str:
    answer = await served.http.post("/v1/rollouts", json=body(PROMPT), headers=ASYNC)
    place: str = answer.headers["location"]
    return place


@pytest.mark.parametrize(
    ("method", "rest"),
    [
        ("GET", ""),
        ("GET", "?wait=0.5"),
        ("DELETE", ""),
        ("POST", "/branch"),
        ("DELETE", "/segments/0.1"),
    ],
)
async def test_rollout_of_another_replica_is_redirected_to_its_address(
    pair: list[Served], method: str, rest: str
) -> None:
    a, b = pair
    place = await submitted(a)
    answer = await b.http.request(method, place + rest)
    assert (answer.status_code, answer.content) == (307, b"")
    assert answer.headers["location"] == a.url + place + rest


async def test_client_that_follows_the_redirect_gets_the_answer(pair: list[Served]) -> None:
    a, b = pair
    place = await submitted(a)
    await running_samples(a, 2)
    engine_of(a).step(4)
    answer = await b.http.get(place, follow_redirects=True)
    assert answer.json()["outcome"] == "done"
    assert engine_of(b).submitted == []


@pytest.mark.parametrize(
    ("method", "rest"),
    [
        ("GET", ""),
        ("GET", "/data"),
        ("HEAD", "/data"),
        ("GET", "/agent"),
        ("POST", "/lease"),
        ("DELETE", ""),
    ],
)
async def test_handle_of_another_replica_is_redirected_to_its_address(
    pair: list[Served], method: str, rest: str
) -> None:
    place = f"/v1/kv/{new_handle_id(pair[0].server.cluster.own_id)}{rest}"
    answer = await pair[1].http.request(method, place)
    assert (answer.status_code, answer.headers["location"]) == (307, pair[0].url + place)


async def test_handle_bytes_can_be_requested_from_any_replica(pair: list[Served]) -> None:
    a, b = pair
    engine_of(a).instant = True
    kv = await export_handle(a)
    whole = [
        await served.http.get(f"/v1/kv/{kv.handle}/data", follow_redirects=True) for served in pair
    ]
    renewed = await b.http.post(
        f"/v1/kv/{kv.handle}/lease", json={"lease_seconds": 9}, follow_redirects=True
    )
    released = await b.http.delete(f"/v1/kv/{kv.handle}", follow_redirects=True)
    assert whole[0].content == whole[1].content
    assert (whole[1].status_code, renewed.status_code, released.status_code) == (200, 200, 204)
    assert len(a.server.prompt_kv.handles) == 0


async def test_idempotency_key_of_one_replica_starts_nothing_on_another(
    pair: list[Served],
) -> None:
    a, b = pair
    key = {"idempotency-key": "k"}
    first = asyncio.create_task(a.http.post("/v1/rollouts", json=body(PROMPT), headers=key))
    await running_samples(a, 2)
    moved = await b.http.post("/v1/rollouts", json=body(PROMPT), headers=key)
    assert (moved.status_code, moved.headers["location"]) == (307, a.url + "/v1/rollouts")
    again = asyncio.create_task(
        b.http.post("/v1/rollouts", json=body(PROMPT), headers=key, follow_redirects=True)
    )
    other = await b.http.post(
        "/v1/rollouts", json=body(group(9)), headers=key, follow_redirects=True
    )
    assert other.json()["code"] == "idempotency_mismatch"
    engine_of(a).step(4)
    assert (await first).json() == (await again).json()
    assert engine_of(b).submitted == []


async def test_same_key_of_another_caller_is_a_different_key(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", one="rollout", two="rollout")
    shared = InMemoryRegistry()
    settings: dict[str, Any] = {"server": {"keys_file": tmp_path / "keys"}}
    async with fleet(tmp_path, [FakeEngine(), FakeEngine()], lambda: shared, **settings) as pair:
        answers = [
            await served.http.post(
                "/v1/rollouts",
                json=body(PROMPT),
                headers=bearer(keys[name]) | {"idempotency-key": "k"},
            )
            for served, name in zip(pair, ("one", "two"), strict=True)
        ]
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_refused_request_leaves_its_key_to_other_replicas(pair: list[Served]) -> None:
    a, b = pair
    key = {"idempotency-key": "k"}
    refused = await a.http.post("/v1/rollouts", json=body(group(300)), headers=key)
    engine_of(b).instant = True
    answer = await b.http.post("/v1/rollouts", json=body(PROMPT), headers=key)
    assert (refused.status_code, answer.status_code) == (422, 200)


async def test_unauthenticated_request_is_not_redirected(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", one="rollout,kv")
    shared = InMemoryRegistry()
    settings: dict[str, Any] = {"server": {"keys_file": tmp_path / "keys"}}
    async with fleet(tmp_path, [FakeEngine(), FakeEngine()], lambda: shared, **settings) as pair:
        place = f"/v1/rollouts/{new_rollout_id(pair[0].server.cluster.own_id)}"
        answer = await pair[1].http.get(place)
    assert answer.status_code == 401


async def test_resource_of_an_expired_replica_answers_gone(tmp_path: Path) -> None:
    shared = InMemoryRegistry()
    async with replica(tmp_path / "b", FakeEngine(), shared) as left:
        async with replica(tmp_path / "a", FakeEngine(), shared) as gone:
            place = await submitted(gone)
            await left.server.cluster.refresh()
            there = await left.http.get(place)
        await left.server.cluster.refresh()
        rollout = await left.http.get(place)
        kv = await left.http.get(f"/v1/kv/{new_handle_id(gone.server.cluster.own_id)}")
    assert there.status_code == 307
    assert (rollout.status_code, rollout.json()["code"]) == (410, "replica_gone")
    assert (kv.status_code, kv.json()["code"]) == (410, "kv_gone")


async def test_key_of_an_expired_replica_starts_a_new_rollout(tmp_path: Path) -> None:
    shared = InMemoryRegistry()
    key = {"idempotency-key": "k"}
    async with replica(tmp_path / "b", FakeEngine(), shared) as left:
        async with replica(tmp_path / "a", FakeEngine(), shared) as gone:
            lost = await gone.http.post("/v1/rollouts", json=body(PROMPT), headers=key)
        answer = await left.http.post("/v1/rollouts", json=body(PROMPT), headers=key)
    assert (lost.status_code, answer.status_code) == (200, 200)
    assert lost.json()["id"] != answer.json()["id"]


async def test_unknown_id_is_not_found(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answers = [await served.http.get(f"/v1/rollouts/{name}") for name in ("none", "0.1", "x.y")]
        mine = await served.http.get(f"/v1/rollouts/{new_rollout_id(served.server.cluster.own_id)}")
        other = await served.http.get(f"/v1/rollouts/{new_rollout_id(new_replica_id())}")
    assert {answer.json()["code"] for answer in (*answers, mine)} == {"rollout_not_found"}
    assert other.json()["code"] == "replica_gone"


async def test_session_of_an_unknown_replica_is_gone(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        own_id = served.server.cluster.own_id
        paths = [f"/v1/sessions/{each}.1" for each in (new_replica_id(), own_id)]
        answers = [await served.http.get(path) for path in paths]
    assert [answer.json()["code"] for answer in answers] == ["replica_gone", "session_not_found"]


async def test_replica_address_may_contain_a_path(tmp_path: Path) -> None:
    shared = InMemoryRegistry()
    gateway: dict[str, Any] = {"server": {"advertised_url": "https://gate/replica/a/"}}
    async with (
        serving(FakeEngine(), tmp_path / "a", shared=shared, **gateway) as a,
        replica(tmp_path / "b", FakeEngine(), shared) as b,
    ):
        place = f"/v1/rollouts/{new_rollout_id(a.server.cluster.own_id)}"
        answer = await b.http.get(place, params={"wait": 1})
    assert answer.headers["location"] == f"https://gate/replica/a{place}?wait=1"


async def test_host_header_does_not_change_the_redirect(tmp_path: Path) -> None:
    shared = InMemoryRegistry()
    engines = [FakeEngine() for _ in "ab"]
    anyone = {"allowed_hosts": ["*"]}
    async with fleet(tmp_path, engines, lambda: shared, server=anyone) as (a, b):
        place = f"/v1/rollouts/{new_rollout_id(a.server.cluster.own_id)}"
        answer = await b.http.get(place, headers={"host": "evil.example"})
        assert urlsplit(answer.headers["location"]).netloc == urlsplit(a.url).netloc


async def test_metrics_count_redirects(pair: list[Served]) -> None:
    a, b = pair
    await b.http.get(await submitted(a))
    metrics = (await b.http.get("/metrics")).text
    assert "coppice_cluster_redirects_total 1.0" in metrics
    assert "coppice_cluster_replicas 2.0" in metrics
    assert "coppice_cluster_up 1.0" in metrics


async def test_retry_during_a_drain_reaches_its_rollout(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    key = {"idempotency-key": "k"}
    async with serving(engine, tmp_path) as served:

        def post() -> "asyncio.Task[httpx.Response]":
            return asyncio.create_task(
                served.http.post("/v1/rollouts", json=body(PROMPT), headers=key)
            )

        first = post()
        await running_samples(served, 2)
        draining = asyncio.create_task(served.server.drain(30))
        await asyncio.sleep(0)
        again = post()
        other = await served.http.post(
            "/v1/rollouts", json=body(PROMPT), headers={"idempotency-key": "other"}
        )
        assert other.json()["code"] == "draining"
        engine.step(4)
        assert (await again).json() == (await first).json()
        await draining
