"""Contract of every cluster registry, in-memory or Redis.

Uses real time: Redis has its own clock.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial

import pytest

from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.redis_registry import RedisRegistry
from service.cluster.registry import (
    ActivationTarget,
    ClusterRegistry,
    Manifest,
    ManifestConflict,
    ManifestFile,
    Replica,
)
from service.config.cluster import ClusterSettings
from tests.redis_server import RedisServer, redis_server

LONG = 60.0
SHORT = 0.15

A = Replica(id="a" * 12, url="http://a:8000", state="serving", version="v0", sequence=0)
B = Replica(id="b" * 12, url="http://b:8000", state="starting", version="v0", sequence=0)
FILE = ManifestFile(name="model.safetensors", sha256="00" * 32, num_bytes=7)
V1 = Manifest(version="v1", sequence=1, files=(FILE,))


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("contract")) as server:
        yield server


@pytest.fixture(params=["embedded", "redis"])
async def directory(request: pytest.FixtureRequest) -> AsyncIterator[ClusterRegistry]:
    if request.param == "embedded":
        yield InMemoryRegistry()
        return
    server: RedisServer = request.getfixturevalue("redis")
    server.flush()
    known = RedisRegistry(ClusterSettings(redis_url=server.url, call_seconds=5))
    yield known
    await known.close()


async def test_replica_with_heartbeats_is_listed_with_its_last_record(
    directory: ClusterRegistry,
) -> None:
    await directory.beat(A, ttl_seconds=LONG)
    changed = replace(A, state="draining", version="v1", sequence=1, epoch=3, holds=("v1",))
    await directory.beat(changed, ttl_seconds=LONG)
    view = await directory.beat(B, ttl_seconds=LONG)
    assert dict(view.replicas) == {A.id: changed, B.id: B}


async def test_replica_without_heartbeats_is_no_longer_listed(directory: ClusterRegistry) -> None:
    await directory.beat(A, ttl_seconds=SHORT)
    await asyncio.sleep(SHORT + 0.05)
    assert dict((await directory.beat(B, ttl_seconds=LONG)).replicas) == {B.id: B}


async def test_unregistered_replica_is_no_longer_listed_and_may_unregister_twice(
    directory: ClusterRegistry,
) -> None:
    await directory.beat(A, ttl_seconds=LONG)
    await directory.leave(A.id)
    await directory.leave(A.id)
    assert dict((await directory.beat(B, ttl_seconds=LONG)).replicas) == {B.id: B}


async def test_heartbeat_returns_whether_the_replica_was_still_listed(
    directory: ClusterRegistry,
) -> None:
    assert not (await directory.beat(A, ttl_seconds=LONG)).known
    assert (await directory.beat(A, ttl_seconds=SHORT)).known
    await asyncio.sleep(SHORT + 0.05)
    assert not (await directory.beat(A, ttl_seconds=LONG)).known


async def test_claim_belongs_to_one_replica(directory: ClusterRegistry) -> None:
    for replica in (A, B):
        await directory.beat(replica, ttl_seconds=LONG)
    first = await directory.claim("p", A.id, ttl_seconds=LONG, allow_takeover=True)
    second = await directory.claim("p", B.id, ttl_seconds=LONG, allow_takeover=True)
    again = await directory.claim("p", A.id, ttl_seconds=LONG, allow_takeover=True)
    other = await directory.claim("q", B.id, ttl_seconds=LONG, allow_takeover=True)
    assert (first, second, again, other) == (A.id, A.id, A.id, B.id)


async def test_one_of_many_concurrent_claims_succeeds(directory: ClusterRegistry) -> None:
    replicas = [replace(A, id=f"{number:012x}") for number in range(8)]
    for replica in replicas:
        await directory.beat(replica, ttl_seconds=LONG)
    claims = [directory.claim("p", r.id, ttl_seconds=LONG, allow_takeover=True) for r in replicas]
    assert len(set(await asyncio.gather(*claims))) == 1


async def test_claim_of_an_unregistered_replica_can_be_taken_over(
    directory: ClusterRegistry,
) -> None:
    await directory.claim("p", A.id, ttl_seconds=LONG, allow_takeover=False)
    await directory.beat(B, ttl_seconds=LONG)
    kept = await directory.claim("p", B.id, ttl_seconds=LONG, allow_takeover=False)
    taken = await directory.claim("p", B.id, ttl_seconds=LONG, allow_takeover=True)
    assert (kept, taken) == (A.id, B.id)


async def test_claim_of_an_expired_replica_can_be_taken_over(
    directory: ClusterRegistry,
) -> None:
    await directory.beat(A, ttl_seconds=SHORT)
    await directory.claim("p", A.id, ttl_seconds=LONG, allow_takeover=False)
    await asyncio.sleep(SHORT + 0.05)
    kept = await directory.claim("p", B.id, ttl_seconds=LONG, allow_takeover=False)
    taken = await directory.claim("p", B.id, ttl_seconds=LONG, allow_takeover=True)
    assert (kept, taken) == (A.id, B.id)


async def test_claim_expires_after_its_ttl(directory: ClusterRegistry) -> None:
    await directory.beat(A, ttl_seconds=LONG)
    await directory.claim("p", A.id, ttl_seconds=SHORT, allow_takeover=False)
    await asyncio.sleep(SHORT + 0.05)
    assert await directory.claim("p", B.id, ttl_seconds=LONG, allow_takeover=False) == B.id


async def test_claim_is_transferred_only_from_its_holder(directory: ClusterRegistry) -> None:
    await directory.claim("p", A.id, ttl_seconds=LONG, allow_takeover=False)
    take = partial(directory.claim, "p", B.id, ttl_seconds=LONG, allow_takeover=False)
    other = await take(source="c" * 12)
    unchanged = await directory.holder("p")
    moved, again = await take(source=A.id), await take(source=A.id)
    assert (other, unchanged, moved, again) == (A.id, A.id, B.id, B.id)
    assert await directory.holder("p") == B.id


async def test_claim_without_a_holder_can_be_transferred(directory: ClusterRegistry) -> None:
    assert await directory.holder("p") is None
    take = partial(directory.claim, "p", B.id, ttl_seconds=SHORT, allow_takeover=False)
    assert await take(source=A.id) == B.id
    await asyncio.sleep(SHORT + 0.05)
    assert await directory.holder("p") is None


async def test_claim_is_released_only_by_its_owner(directory: ClusterRegistry) -> None:
    await directory.beat(A, ttl_seconds=LONG)
    await directory.claim("p", A.id, ttl_seconds=LONG, allow_takeover=False)
    await directory.release("p", B.id)
    kept = await directory.claim("p", B.id, ttl_seconds=LONG, allow_takeover=True)
    await directory.release("p", A.id)
    await directory.release("p", A.id)
    freed = await directory.claim("p", B.id, ttl_seconds=LONG, allow_takeover=False)
    assert (kept, freed) == (A.id, B.id)


async def test_manifest_is_listed_until_it_is_withdrawn(directory: ClusterRegistry) -> None:
    delta = replace(V1, version="v2", sequence=2, base="v1", path="/shared/v2")
    for manifest in (V1, V1, delta):
        await directory.publish(manifest)
    refresh = (await directory.beat(A, ttl_seconds=LONG)).manifests
    for _ in "ab":
        await directory.withdraw("v1")
    left = (await directory.beat(A, ttl_seconds=LONG)).manifests
    assert (dict(refresh), dict(left)) == ({"v1": V1, "v2": delta}, {"v2": delta})


@pytest.mark.parametrize(
    "other",
    [
        replace(V1, sequence=2),
        replace(V1, version="v2"),
        replace(V1, files=(replace(FILE, sha256="11" * 32),)),
    ],
    ids=["another sequence", "another label", "other bytes"],
)
async def test_version_keeps_its_content_and_its_sequence(
    directory: ClusterRegistry, other: Manifest
) -> None:
    await directory.publish(V1)
    with pytest.raises(ManifestConflict):
        await directory.publish(other)
    assert dict((await directory.beat(A, ttl_seconds=LONG)).manifests) == {"v1": V1}


async def test_later_of_two_activation_targets_wins(directory: ClusterRegistry) -> None:
    first = ActivationTarget(epoch=1, version="v1")
    second = ActivationTarget(
        epoch=2, version="v0", mode="wait", allow_rollback=True, kv="keep_running"
    )
    rival = ActivationTarget(epoch=2, version="v9")
    stood = [await directory.set_target(target) for target in (first, second, rival, first)]
    assert stood == [first, second, second, second]
    assert (await directory.beat(A, ttl_seconds=LONG)).target == second
