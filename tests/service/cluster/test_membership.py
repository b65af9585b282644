"""A replica's view of a cluster registry that fails, on a clock controlled by the test."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from service.cluster.idempotency_claim import IdempotencyClaim
from service.cluster.idempotency_keys import IdempotencyKeys
from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.membership import ClusterMembership
from service.cluster.registry import ClusterView, RegistryUnavailable, Replica
from service.config.cluster import ClusterSettings
from service.errors import ClusterUnavailable, Draining, RedirectToReplica, ReplicaGone
from service.observability.metrics import ClusterMetrics

A = Replica(id="a" * 12, url="http://a", state="serving", version="v0", sequence=0)
B = Replica(id="b" * 12, url="http://b", state="serving", version="v0", sequence=0)
SETTINGS = ClusterSettings(redis_url="redis://nowhere")
EXPIRE = SETTINGS.expire_seconds
KEEP_SECONDS = 3600.0


class Faulty(InMemoryRegistry):
    """`silent`: every call fails without an answer; `claiming` and `releasing` run before it."""

    def __init__(self, clock: "Clock") -> None:
        super().__init__(clock=clock)
        self.silent = False
        self.claiming: Callable[[], Awaitable[None]] | None = None
        self.releasing: Callable[[], Awaitable[None]] | None = None
        self.beats = 0

    @property
    def num_claims(self) -> int:
        return len(self._claims)

    def forget(self) -> None:
        self.__init__(self._clock)  # type: ignore[misc]

    async def beat(self, replica: Replica, *, ttl_seconds: float) -> ClusterView:
        self.beats += 1
        view: ClusterView = await self._heard(super().beat(replica, ttl_seconds=ttl_seconds))
        return view

    async def claim(
        self, registry_key: str, replica_id: str, *, source: str | None = None, **options: Any
    ) -> str:
        if self.claiming is not None:
            await self.claiming()
        holder: str = await self._heard(
            super().claim(registry_key, replica_id, source=source, **options)
        )
        return holder

    async def release(self, place: str, replica_id: str) -> None:
        if self.releasing is not None:
            await self.releasing()
        await self._heard(super().release(place, replica_id))

    async def _heard(self, work: Coroutine[Any, Any, Any]) -> Any:
        await asyncio.sleep(0)
        if self.silent:
            work.close()
            raise RegistryUnavailable("silent")
        return await work


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class MembershipProbe:
    """One replica under test with its keys, its cluster registry, and the other replicas."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.registry = Faulty(self.clock)
        self.counts = CollectorRegistry()
        metrics = ClusterMetrics(self.counts)
        self.cluster = ClusterMembership(
            self.registry, SETTINGS, metrics, describe=lambda: A, clock=self.clock
        )
        self.keys = IdempotencyKeys(
            self.cluster, metrics, max_seconds=KEEP_SECONDS, clock=self.clock
        )
        self._claims: dict[str, IdempotencyClaim] = {}

    async def claim(self, key: str) -> None:
        """Claim a key as a request that is accepted."""
        claim = IdempotencyClaim("local", key, b"")
        async with self.keys.claimed(claim):
            self._claims[key] = claim

    def release(self, key: str) -> None:
        self.keys.release(self._claims[key])

    async def refuse(self, key: str, during: Callable[[], Awaitable[None]] | None = None) -> None:
        """Claim a key as a request that is refused, after `during`."""
        with pytest.raises(Draining):
            async with self.keys.claimed(IdempotencyClaim("local", key, b"")):
                if during is not None:
                    await during()
                raise Draining(retry_after_seconds=1)

    async def claimed_by(self, other: Replica, key: str) -> str:
        """Id of the holder of a key after another replica has claimed it."""
        return await self.registry.claim(
            f"local\n{key}", other.id, ttl_seconds=1e6, allow_takeover=False
        )

    @property
    def num_unshared(self) -> float | None:
        return self.counts.get_sample_value("coppice_cluster_unregistered_keys_total")

    @property
    def failed(self) -> list[str]:
        """Operations that have failed, sorted, each as often as it has."""
        counted = {
            sample.labels["operation"]: int(sample.value)
            for family in self.counts.collect()
            for sample in family.samples
            if sample.name == "coppice_cluster_failures_total"
        }
        return sorted(Counter(counted).elements())

    async def pass_by(self, ttl_seconds: float, *others: Replica) -> None:
        """Sends heartbeats of this replica and `others` for this many seconds."""
        for _ in range(round(ttl_seconds / SETTINGS.heartbeat_seconds)):
            self.clock.now += SETTINGS.heartbeat_seconds
            for other in others:
                await InMemoryRegistry.beat(self.registry, other, ttl_seconds=EXPIRE)
            await self.beat()

    async def beat(self) -> None:
        self.clock.now += 0.001
        try:
            await self.cluster.refresh()
        except RegistryUnavailable:
            assert self.cluster.unavailable

    async def asked_for(self, replica: Replica) -> str:
        try:
            await self.cluster.check_local(replica.id)
        except (RedirectToReplica, ReplicaGone, ClusterUnavailable) as answer:
            return getattr(answer, "url", type(answer).__name__)
        return "here"


@pytest.fixture
def refresh() -> MembershipProbe:
    return MembershipProbe()


async def test_unlisted_replica_is_gone_only_after_all_had_time_to_register(
    refresh: MembershipProbe,
) -> None:
    early = await refresh.asked_for(B)
    await refresh.pass_by(EXPIRE + 3)
    assert (early, await refresh.asked_for(B)) == ("ClusterUnavailable", "ReplicaGone")


async def test_newly_registered_replica_is_looked_up(refresh: MembershipProbe) -> None:
    await refresh.beat()
    await InMemoryRegistry.beat(refresh.registry, B, ttl_seconds=EXPIRE)
    assert await refresh.asked_for(B) == B.url


async def test_lost_registry_is_not_needed_for_cached_entries(refresh: MembershipProbe) -> None:
    await refresh.pass_by(EXPIRE + 3, B)
    refresh.registry.silent = True
    await refresh.pass_by(10 * EXPIRE)
    other = Replica(id="c" * 12, url="http://c", state="serving", version="v0", sequence=0)
    assert (refresh.cluster.unavailable, await refresh.asked_for(B)) == (True, B.url)
    assert await refresh.asked_for(other) == "ClusterUnavailable"
    assert set(refresh.failed) == {"heartbeat"}


async def test_after_a_flush_no_replica_is_gone_until_confirmed(refresh: MembershipProbe) -> None:
    await refresh.pass_by(EXPIRE + 3, B)
    refresh.registry.forget()
    await refresh.beat()
    assert (refresh.cluster.is_settled, await refresh.asked_for(B)) == (False, B.url)
    await refresh.pass_by(EXPIRE + 3)
    assert (refresh.cluster.is_settled, await refresh.asked_for(B)) == (True, "ReplicaGone")


async def test_concurrent_lookups_of_an_unknown_id_query_the_registry_once(
    refresh: MembershipProbe,
) -> None:
    await refresh.pass_by(EXPIRE + 3)
    before = refresh.registry.beats
    refresh.clock.now += 1

    async def later() -> str:
        return await refresh.asked_for(B)

    answers = await asyncio.gather(*(later() for _ in range(50)))
    assert set(answers) == {"ReplicaGone"}
    assert refresh.registry.beats <= before + 2


async def test_exception_in_a_heartbeat_stops_nothing(refresh: MembershipProbe) -> None:
    class Broken(Faulty):
        async def beat(self, replica: Replica, *, ttl_seconds: float) -> ClusterView:
            self.beats += 1
            raise RuntimeError("a bug")

    broken = refresh.cluster.registry = Broken(refresh.clock)
    async with refresh.cluster.running():
        while broken.beats < 2:
            await asyncio.sleep(0.01)
        assert refresh.cluster.unavailable


async def test_unregistered_replica_is_no_longer_listed(refresh: MembershipProbe) -> None:
    async with refresh.cluster.running():
        while refresh.cluster.unavailable:
            await asyncio.sleep(0.001)
    assert A.id not in (await refresh.registry.beat(B, ttl_seconds=9)).replicas
    with pytest.raises(RegistryUnavailable):
        await refresh.cluster.refresh()
    assert A.id not in (await refresh.registry.beat(B, ttl_seconds=9)).replicas, "it has left"
