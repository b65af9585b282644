"""Redis failures as replicas see them: killed, paused, flushed, restarted, refusing, behind TLS.

Rollouts continue through all of them. Only access to other replicas' resources is lost, and it
recovers.
"""

import asyncio
import json
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from service.cluster.redis_registry import RedisRegistry
from service.cluster.registry import ActivationTarget, Manifest, RegistryUnavailable, Replica
from service.config.cluster import ClusterSettings
from tests.cluster import fleet, replica, sees
from tests.fake_engine import FakeEngine
from tests.ports import free_port
from tests.redis_server import RedisServer, redis_server
from tests.service.test_rollouts import body, group
from tests.serving import Served

pytestmark = pytest.mark.slow

PROMPT = group(1, 2, 3, n=2)
ASYNC = {"prefer": "respond-async"}
CALL_SECONDS = 0.3
HEARTBEAT_SECONDS = 0.2
EXPIRE_SECONDS = 1.5
ME = Replica(id="a" * 12, url="http://a", state="serving", version="v0", sequence=0)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


def section(redis: RedisServer, **changes: Any) -> dict[str, Any]:
    return {
        "redis_url": redis.url,
        "call_seconds": CALL_SECONDS,
        "heartbeat_seconds": HEARTBEAT_SECONDS,
        "expire_seconds": EXPIRE_SECONDS,
        **changes,
    }


def patient(redis: RedisServer, **changes: Any) -> dict[str, Any]:
    """Settings with long timeouts, for tests in which latency is irrelevant."""
    return section(redis, call_seconds=5.0, expire_seconds=30.0, **changes)


@pytest.fixture
async def pair(redis: RedisServer, tmp_path: Path) -> AsyncIterator[list[Served]]:
    engines = [FakeEngine(), FakeEngine()]
    settings: dict[str, dict[str, Any]] = {
        "cluster": section(redis),
        "weights": {
            "replication_seconds": 0.1
        },  # no activation target is set here, since applying one takes until an entry expires
    }
    async with fleet(tmp_path, engines, lambda: None, **settings) as replicas:
        yield replicas


async def submitted(served: Served) -> str:
    answer = await served.http.post("/v1/rollouts", json=body(PROMPT), headers=ASYNC)
    assert answer.status_code == 202
    place: str = answer.headers["location"]
    return place


async def keyed(served: Served, key: str) -> httpx.Response:
    headers = {"idempotency-key": key}
    return await served.http.post(
        "/v1/rollouts", json=body(PROMPT), headers=headers, follow_redirects=True
    )


async def until(served: Served, *, unavailable: bool) -> None:
    async with asyncio.timeout(30):
        while served.server.cluster.unavailable is not unavailable:
            await asyncio.sleep(0.01)


async def metric(served: Served, name: str) -> float:
    text = (await served.http.get("/metrics")).text
    values = (line.split()[1] for line in text.splitlines() if line.startswith(name + " "))
    return sum(map(float, values))


def take_away(redis: RedisServer, how: str) -> None:
    redis.kill() if how == "kill" else redis.pause()


def bring_back(redis: RedisServer, how: str) -> None:
    redis.start() if how == "kill" else redis.resume()


@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_without_redis_rollouts_continue_and_cached_entries_resolve(
    redis: RedisServer, pair: list[Served], how: str
) -> None:
    a, b = pair
    place = await submitted(a)
    take_away(redis, how)
    try:
        answers = [await keyed(a, f"key-{number}") for number in range(20)]
        found = await b.http.get(place, follow_redirects=True)
        await until(a, unavailable=True)
        assert await metric(a, "coppice_cluster_up") == 0
        assert await metric(a, "coppice_cluster_unregistered_keys_total") > 0
        failed_claims = await metric(a, 'coppice_cluster_failures_total{operation="claim"}')
        assert (await a.http.get("/readyz")).status_code == 200
    finally:
        bring_back(redis, how)
    assert {answer.status_code for answer in answers} == {200}
    # The connection to a killed server fails at once, so that claims may fail without waiting.
    assert how == "kill" or failed_claims < len(answers) / 2, "each request waited for the registry"
    assert found.status_code == 200
    for served in pair:
        await sees(served, 1)
    moved = await b.http.post(
        "/v1/rollouts", json=body(PROMPT), headers={"idempotency-key": "key-0"}
    )
    assert moved.headers["location"] == f"{a.url}/v1/rollouts"


async def test_flush_under_load_recovers_by_itself(redis: RedisServer, pair: list[Served]) -> None:
    a, b = pair
    answered: list[int] = []

    async def load(served: Served, name: str) -> None:
        for number in range(60):
            answer = await keyed(served, f"{name}-{number}")
            answered.append(answer.status_code)
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as tasks:
        for served, name in ((a, "a"), (b, "b")):
            tasks.create_task(load(served, name))
        for disturb in (redis.flush, redis.restart, redis.flush):
            await asyncio.sleep(0.15)
            await asyncio.to_thread(disturb)
    assert answered == [200] * 120
    for served in pair:
        await sees(served, 2)
    for one, other, name in ((a, b, "a"), (b, a, "b")):
        again = await other.http.post(
            "/v1/rollouts", json=body(PROMPT), headers={"idempotency-key": f"{name}-59"}
        )
        assert again.headers["location"].startswith(one.url)


async def test_live_replica_is_not_called_gone_after_a_flush(
    redis: RedisServer, pair: list[Served]
) -> None:
    a, b = pair
    place = await submitted(a)
    statuses = set()
    for _ in range(5):
        redis.flush()
        for _ in range(10):
            statuses.add((await b.http.get(place)).status_code)
            await asyncio.sleep(0.01)
    assert 307 in statuses <= {307, 503}  # a busy machine may not get Redis's answer in time


async def test_replica_silent_for_long_is_gone(redis: RedisServer, tmp_path: Path) -> None:
    settings = {"cluster": section(redis)}
    known = RedisRegistry(ClusterSettings(**section(redis)))
    async with replica(tmp_path / "b", FakeEngine(), None, **settings) as served:
        await known.beat(ME, ttl_seconds=2.0)
        name = f"{ME.id}.x"
        there = await served.http.get(f"/v1/rollouts/{name}")
        async with asyncio.timeout(30):
            while (await served.http.get(f"/v1/rollouts/{name}")).status_code != 410:
                await asyncio.sleep(0.05)
        assert served.server.cluster.is_settled
    await known.close()
    assert there.status_code in (307, 503)


async def test_server_starts_and_stops_without_redis(tmp_path: Path) -> None:
    nowhere = {"redis_url": f"redis://127.0.0.1:{free_port()}/0", "call_seconds": CALL_SECONDS}
    weights = {"replication_seconds": 0.5}
    sections: dict[str, dict[str, Any]] = {"cluster": nowhere, "weights": weights}
    async with replica(tmp_path, FakeEngine(), None, **sections) as served:
        assert (await keyed(served, "k")).status_code == 200
        unknown = await served.http.get(f"/v1/rollouts/{ME.id}.x")
    assert (unknown.status_code, unknown.json()["code"]) == (503, "cluster_unavailable")
    assert int(unknown.headers["retry-after"]) > 0


async def test_every_key_in_redis_has_an_expiry(redis: RedisServer, tmp_path: Path) -> None:
    async with replica(tmp_path, FakeEngine(), None, cluster=section(redis)) as served:
        await sees(served, 1)
        await keyed(served, "secret-key")
        during = redis.keys()
    left = redis.keys()
    assert len(during) == 3
    assert all(key.startswith("{coppice}:") and "secret-key" not in key for key in during)
    assert [key.partition(":")[2].partition(":")[0] for key in left] == ["claim"]


async def test_clusters_with_different_prefixes_are_isolated(redis: RedisServer) -> None:
    directories = [
        RedisRegistry(ClusterSettings(**patient(redis, key_prefix=prefix)))
        for prefix in ("one", "two")
    ]
    for directory in directories:
        assert not (await directory.beat(ME, ttl_seconds=9)).known
        await directory.close()


ACL = (
    "user default off",
    "user coppice on >s3cret ~{coppice}:* &* -@all +@connection +@read +@write +@scripting +time",
)


async def test_restricted_acl_user_is_sufficient(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("s3cret\n")
    with redis_server(tmp_path, ACL) as redis:
        named = {"redis_user": "coppice", "redis_password_file": password}
        known = RedisRegistry(ClusterSettings(**patient(redis, **named)))
        view = await known.beat(ME, ttl_seconds=9)
        assert await known.claim("p", ME.id, ttl_seconds=9, allow_takeover=True) == ME.id
        await known.withdraw("v1")
        await known.close()
        assert dict(view.replicas) == {ME.id: ME}
        other = tmp_path / "other"
        other.write_text("wrong\n")
        for wrong in ({}, {"redis_user": "coppice", "redis_password_file": other}):
            refused = RedisRegistry(ClusterSettings(**patient(redis, **wrong)))
            with pytest.raises(RegistryUnavailable):
                await refused.beat(ME, ttl_seconds=9)
            await refused.close()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    key, file = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", "/CN=redis", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", str(key), "-out", str(file)),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert ssl.create_default_context(cafile=str(file))
    return key, file


async def test_tls_is_used_and_its_certificate_is_verified(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    key, file = certificate
    port = free_port()
    lines = [f"tls-port {port}", f"tls-cert-file {file}", f"tls-key-file {key}"]
    with redis_server(tmp_path, [*lines, "tls-auth-clients no"]):
        url = {"redis_url": f"rediss://127.0.0.1:{port}/0", "call_seconds": 5, "expire_seconds": 30}
        trusting = RedisRegistry(ClusterSettings(**url, tls_ca_file=file))
        assert not (await trusting.beat(ME, ttl_seconds=9)).known
        await trusting.close()
        wary = RedisRegistry(ClusterSettings(**url))
        with pytest.raises(RegistryUnavailable):
            await wary.beat(ME, ttl_seconds=9)
        await wary.close()


async def test_entry_of_another_release_is_read_as_far_as_understood(
    redis: RedisServer,
) -> None:
    known = RedisRegistry(ClusterSettings(**patient(redis)))
    await known.beat(ME, ttl_seconds=9)
    entries = {
        "b" * 12: (
            '{"id": "%s", "url": "http://b", "state": "serving", "version": "v0", '
            '"sequence": 0, "hats": 3}' % ("b" * 12)
        ),
        "c" * 12: '{"id": 3}',
        "d" * 12: "not JSON",
    }
    put_replicas(redis, entries)
    view = await known.beat(ME, ttl_seconds=9)
    await known.close()
    assert set(view.replicas) == {ME.id, "b" * 12}


def put_replicas(redis: RedisServer, entries: dict[str, str]) -> None:
    """Registers replicas for a minute as a foreign client would."""
    redis.put("{coppice}:replicas", entries)
    for field in entries:
        redis.put_deadline("{coppice}:deadlines", field, (time.time() + 60) * 1000)


OTHER: dict[str, Any] = {
    "id": "b" * 12,
    "url": "http://b",
    "state": "serving",
    "version": "v0",
    "sequence": 0,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence": 10**400},
        {"sequence": -1},
        {"epoch": 2**53},
        {"epoch": 1e300},
        {"url": "http://b\r\nSet-Cookie: a=b"},
        {"url": "http://\u0100"},
        {"url": "javascript:alert(1)//"},
        {"url": "http://b/" + "b" * 5000},
        {"id": "c" * 12},
        {"id": ME.id, "url": "http://evil"},
    ],
)
async def test_forged_replica_is_ignored(redis: RedisServer, changes: dict[str, Any]) -> None:
    known = RedisRegistry(ClusterSettings(**patient(redis)))
    put_replicas(redis, {OTHER["id"]: json.dumps(OTHER | changes)})
    view = await known.beat(ME, ttl_seconds=9)
    await known.close()
    assert dict(view.replicas) == {ME.id: ME}


async def test_manifest_under_another_label_or_with_an_unusable_sequence_is_ignored(
    redis: RedisServer,
) -> None:
    known = RedisRegistry(ClusterSettings(**patient(redis)))
    forged = {
        "other": '{"version": "v1", "sequence": 1, "files": []}',
        "v2": f'{{"version": "v2", "sequence": {2**53}, "files": []}}',
        "v3": '{"version": "v3", "sequence": -3, "files": []}',
    }
    redis.put("{coppice}:manifests", forged)
    view = await known.beat(ME, ttl_seconds=9)
    await known.close()
    assert not view.manifests


@pytest.mark.parametrize("seconds", [None, -10.0, 40 * 86_400.0, float("inf"), float("-inf")])
async def test_replica_without_a_plausible_deadline_is_removed(
    redis: RedisServer, seconds: float | None
) -> None:
    known = RedisRegistry(ClusterSettings(**patient(redis)))
    redis.put("{coppice}:replicas", {OTHER["id"]: json.dumps(OTHER)})
    if seconds is not None:
        deadline = (time.time() + seconds) * 1000
        redis.put_deadline("{coppice}:deadlines", OTHER["id"], deadline)
    view = await known.beat(ME, ttl_seconds=9)
    assert dict(view.replicas) == {ME.id: ME}
    await known.claim("key", OTHER["id"], ttl_seconds=60, allow_takeover=False)
    assert await known.claim("key", ME.id, ttl_seconds=60, allow_takeover=True) == ME.id
    await known.close()


async def test_holder_that_is_not_text_is_replaced(redis: RedisServer) -> None:
    known = RedisRegistry(ClusterSettings(**patient(redis)))
    await known.claim("key", ME.id, ttl_seconds=60, allow_takeover=False)
    claim = next(name for name in redis.keys() if ":claim:" in name)  # noqa: SIM118
    redis.put(claim, b"\xff\xfe")
    assert await known.holder("key") not in (None, ME.id)
    assert await known.claim("key", ME.id, ttl_seconds=60, allow_takeover=False) != ME.id
    assert await known.claim("key", ME.id, ttl_seconds=60, allow_takeover=True) == ME.id
    await known.close()


@pytest.mark.parametrize(
    "unreadable",
    [
        "not JSON",
        "3",
        '{"epoch": "high", "version": 3}',
        '{"epoch": 7, "version": 3}',
        '{"epoch": 1e300, "version": "v1"}',
    ],
)
async def test_unreadable_entry_blocks_no_replica(redis: RedisServer, unreadable: str) -> None:
    known = RedisRegistry(ClusterSettings(**patient(redis)))
    redis.put("{coppice}:manifests", {"other": unreadable, "v1": unreadable})
    redis.put("{coppice}:target", unreadable)
    manifest, target = (
        Manifest(version="v1", sequence=1, files=()),
        ActivationTarget(epoch=1, version="v1"),
    )
    await known.publish(manifest)
    assert await known.set_target(target) == target
    view = await known.beat(ME, ttl_seconds=9)
    await known.close()
    assert (dict(view.manifests), view.target) == ({"v1": manifest}, target)


@pytest.mark.parametrize(
    "url", ["redis://user:secret@host", "redis://host?password=s", "rediss://host#x"]
)
def test_url_with_a_password_or_an_option_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="redis_password_file"):
        ClusterSettings(redis_url=url)
