"""Cluster registry in process memory, for a single server and for tests.

Replicas that share it must run on the same event loop.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from service.cluster.registry import (
    ActivationTarget,
    ClusterView,
    Manifest,
    ManifestConflict,
    Replica,
)


class _ReplicaEntry(NamedTuple):
    replica: Replica
    deadline: float


class _ClaimEntry(NamedTuple):
    replica_id: str
    deadline: float


class InMemoryRegistry:
    """In-memory `ClusterRegistry`, which is always available.

    Expired entries are ignored, and removed with the next heartbeat, so that the cost of a claim
    does not grow with the number of claims.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, _ReplicaEntry] = {}
        self._claims: dict[str, _ClaimEntry] = {}
        self._manifests: dict[str, Manifest] = {}
        self._target: ActivationTarget | None = None

    async def beat(self, replica: Replica, *, ttl_seconds: float) -> ClusterView:
        self._drop_expired()
        known = replica.id in self._replicas
        self._replicas[replica.id] = _ReplicaEntry(replica, self._clock() + ttl_seconds)
        return ClusterView(
            known=known,
            replicas={name: entry.replica for name, entry in self._replicas.items()},
            manifests=dict(self._manifests),
            target=self._target,
        )

    async def leave(self, replica_id: str) -> None:
        self._replicas.pop(replica_id, None)

    async def claim(
        self,
        registry_key: str,
        replica_id: str,
        *,
        source: str | None = None,
        ttl_seconds: float,
        allow_takeover: bool,
    ) -> str:
        now, holder = self._clock(), self._claims.get(registry_key)
        if holder and holder.deadline > now and holder.replica_id not in (replica_id, source):
            entry = self._replicas.get(holder.replica_id)
            if not allow_takeover or (entry and entry.deadline > now):
                return holder.replica_id
        self._claims[registry_key] = _ClaimEntry(replica_id, now + ttl_seconds)
        return replica_id

    async def release(self, registry_key: str, replica_id: str) -> None:
        if registry_key in self._claims and self._claims[registry_key].replica_id == replica_id:
            del self._claims[registry_key]

    async def holder(self, registry_key: str) -> str | None:
        held = self._claims.get(registry_key)
        return held.replica_id if held and held.deadline > self._clock() else None

    async def publish(self, manifest: Manifest) -> None:
        for known in self._manifests.values():
            is_conflict = known.version == manifest.version or known.sequence == manifest.sequence
            if is_conflict and known != manifest:
                raise ManifestConflict(f"{known.version!r} has sequence {known.sequence} already")
        self._manifests[manifest.version] = manifest

    async def withdraw(self, version: str) -> None:
        self._manifests.pop(version, None)

    async def set_target(self, target: ActivationTarget) -> ActivationTarget:
        if self._target is None or target.epoch > self._target.epoch:
            self._target = target
        return self._target

    async def close(self) -> None:
        """Do nothing, as an in-memory registry holds no resources."""

    def _drop_expired(self) -> None:
        now = self._clock()
        for replica_id in [i for i, entry in self._replicas.items() if entry.deadline <= now]:
            del self._replicas[replica_id]
        for registry_key in [p for p, claimed in self._claims.items() if claimed.deadline <= now]:
            del self._claims[registry_key]
