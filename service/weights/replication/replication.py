"""Weights across the fleet: the parts, put together for the server."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from coppice.wire.weights import (
    ActivationAnswer,
    ActivationMode,
    ReplicaWeights,
    VersionsAnswer,
)
from service.cluster.membership import Fleet
from service.cluster.registry import Replica, Sight
from service.config.settings import WeightsSettings
from service.weights.checkpoint_store import Checkpoints
from service.weights.replication.coordinator import Publication
from service.weights.replication.downloader import Pull, Way
from service.weights.replication.follower import Follower
from service.weights.replication.peers import Peers
from service.weights.replication.replica_status import Standing
from service.weights.stager import Publisher
from service.weights.versions import Version, Versions

Activate = Callable[[str, ActivationMode, bool], Awaitable[ActivationAnswer]]


class FleetWeights:
    """A server that is `alone` has nobody to tell: nothing of this runs."""

    def __init__(
        self,
        settings: WeightsSettings,
        fleet: Fleet,
        versions: Versions,
        publisher: Publisher,
        checkpoints: Checkpoints,
        standing: Standing,
        *,
        alone: bool,
        activate: Activate,
        came: Callable[[Way], None],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._versions = versions
        self._standing = standing
        self._alone = alone
        self._activate = activate
        peers = Peers(settings.peers, settings.peer_key_file)
        pull = Pull(
            publisher, checkpoints, peers, max_file_bytes=settings.max_upload_bytes, came=came
        )
        self._follower = Follower(
            fleet,
            versions,
            publisher,
            pull,
            standing,
            activate=lambda label, mode: self._activate_unchanged(label, mode, True),
        )
        self._publication = Publication(
            fleet,
            versions,
            self._follower,
            activate=self._activate_unchanged,
            seconds=settings.fleet_seconds,
        )
        fleet.watchers.append(self._saw)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        following = None if self._alone else asyncio.create_task(self._follower.run())
        try:
            yield
        finally:
            self._publication.stop()
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def catch_up(self) -> None:
        if not self._alone:
            await self._follower.catch_up(self._settings.catch_up_seconds)

    async def activate(
        self, label: str, mode: ActivationMode, *, allow_rollback: bool
    ) -> ActivationAnswer:
        if self._alone:
            return await self._activate(label, mode, allow_rollback)
        return await self._publication.activate(label, mode, allow_rollback=allow_rollback)

    async def _activate_unchanged(
        self, label: str, mode: ActivationMode, allow_rollback: bool
    ) -> ActivationAnswer:
        await self._follower.check_unchanged(label)
        return await self._activate(label, mode, allow_rollback)

    async def announce(self, version: Version) -> bool:
        return self._alone or await self._follower.announce(version)

    async def dropped(self, label: str) -> None:
        if not self._alone:
            await self._follower.dropped(label)

    def answer(self) -> VersionsAnswer:
        order = self._fleet.sight.order
        return VersionsAnswer(
            active=self._versions.active.label,
            ordered=None if order is None else order.version,
            versions=[version.answer() for version in self._versions.all()],
            replicas=[self._shown(replica) for replica in self._replicas()],
        )

    def skew(self) -> int:
        """Between the newest and the oldest version that is served, in sequence numbers."""
        sequences = [r.sequence for r in self._replicas() if r.state != "starting"]
        return max(sequences, default=0) - min(sequences, default=0)

    def num_behind(self) -> int:
        return sum(self._behind(replica) > 0 for replica in self._replicas())

    def num_failed(self) -> int:
        return sum(replica.failed is not None for replica in self._replicas())

    def _replicas(self) -> list[Replica]:
        replicas = self._fleet.sight.replicas
        return [replicas[replica_id] for replica_id in sorted(replicas)]

    def _shown(self, replica: Replica) -> ReplicaWeights:
        return ReplicaWeights(
            replica=replica.id,
            state=replica.state,
            version=replica.version,
            sequence=replica.sequence,
            behind=self._behind(replica),
            staged=list(replica.staged),
            failed=replica.failed,
            error=replica.error,
        )

    def _behind(self, replica: Replica) -> int:
        """By how much the version that is ordered is newer than the one that it serves."""
        sight = self._fleet.sight
        if sight.order is None:
            return 0
        ordered = self._versions.sequence_of(sight.order.version)
        return 0 if ordered is None else max(0, ordered - replica.sequence)

    def _saw(self, sight: Sight) -> None:
        self._versions.hear_of({m.version: m.sequence for m in sight.manifests.values()})
