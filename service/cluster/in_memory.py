"""The directory of a server that is alone, and of tests: plain tables in one process.

Replicas that share it share an event loop.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from service.cluster.registry import Manifest, ManifestConflict, Order, Replica, Sight


class _Listed(NamedTuple):
    replica: Replica
    deadline: float


class _Claimed(NamedTuple):
    replica_id: str
    deadline: float


class EmbeddedDirectory:
    """Is never lost. What has expired goes with the next heartbeat, and counts for nothing before:
    a claim must not cost more the more there are."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, _Listed] = {}
        self._claims: dict[str, _Claimed] = {}
        self._manifests: dict[str, Manifest] = {}
        self._order: Order | None = None

    async def beat(self, replica: Replica, *, seconds: float) -> Sight:
        self._trim()
        known = replica.id in self._replicas
        self._replicas[replica.id] = _Listed(replica, self._clock() + seconds)
        return Sight(
            known=known,
            replicas={name: listed.replica for name, listed in self._replicas.items()},
            manifests=dict(self._manifests),
            order=self._order,
        )

    async def leave(self, replica_id: str) -> None:
        self._replicas.pop(replica_id, None)

    async def claim(self, place: str, replica_id: str, *, seconds: float, take_over: bool) -> str:
        now, held = self._clock(), self._claims.get(place)
        if held and held.deadline > now and held.replica_id != replica_id:
            listed = self._replicas.get(held.replica_id)
            if not take_over or (listed and listed.deadline > now):
                return held.replica_id
        self._claims[place] = _Claimed(replica_id, now + seconds)
        return replica_id

    async def release(self, place: str, replica_id: str) -> None:
        if place in self._claims and self._claims[place].replica_id == replica_id:
            del self._claims[place]

    async def publish(self, manifest: Manifest) -> None:
        for known in self._manifests.values():
            named_alike = known.version == manifest.version or known.sequence == manifest.sequence
            if named_alike and known != manifest:
                raise ManifestConflict(f"{known.version!r} has sequence {known.sequence} already")
        self._manifests[manifest.version] = manifest

    async def withdraw(self, version: str) -> None:
        self._manifests.pop(version, None)

    async def order(self, order: Order) -> Order:
        if self._order is None or order.epoch > self._order.epoch:
            self._order = order
        return self._order

    async def close(self) -> None:
        """There is nothing to close."""

    def _trim(self) -> None:
        now = self._clock()
        for replica_id in [i for i, listed in self._replicas.items() if listed.deadline <= now]:
            del self._replicas[replica_id]
        for place in [p for p, claimed in self._claims.items() if claimed.deadline <= now]:
            del self._claims[place]
