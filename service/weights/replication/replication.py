"""Weight replication across the cluster: composition of follower, coordinator and downloader."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from coppice.wire.weights import ActivationAnswer, ActivationMode, ReplicaWeights, VersionsAnswer
from service.cluster.membership import ClusterMembership
from service.cluster.registry import ClusterView, Replica
from service.config.settings import WeightsSettings
from service.weights.checkpoint_store import CheckpointStore
from service.weights.replication.coordinator import ActivationCoordinator
from service.weights.replication.downloader import FetchMethod, WeightsDownloader
from service.weights.replication.follower import Follower
from service.weights.replication.peers import Peers
from service.weights.replication.replica_status import ReplicaStatus
from service.weights.stager import WeightStager
from service.weights.versions import Version, Versions

Activate = Callable[[str, ActivationMode, bool], Awaitable[ActivationAnswer]]


class WeightReplication:
    """Facade of weight replication. With `is_standalone` all of it is disabled."""

    def __init__(
        self,
        settings: WeightsSettings,
        fleet: ClusterMembership,
        versions: Versions,
        stager: WeightStager,
        checkpoints: CheckpointStore,
        replica_status: ReplicaStatus,
        *,
        is_standalone: bool,
        activate: Activate,
        on_fetched: Callable[[FetchMethod], None],
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._versions = versions
        self._replica_status = replica_status
        self._is_standalone = is_standalone
        self._activate = activate
        peers = Peers(settings.peers, settings.peer_key_file)
        downloader = WeightsDownloader(
            stager,
            checkpoints,
            peers,
            max_file_bytes=settings.max_upload_bytes,
            on_fetched=on_fetched,
        )
        self._follower = Follower(
            fleet,
            versions,
            stager,
            downloader,
            replica_status,
            activate=lambda label, mode: self._activate_unchanged(label, mode, True),
        )
        self._coordinator = ActivationCoordinator(
            fleet,
            versions,
            self._follower,
            activate=self._activate_unchanged,
            seconds=settings.fleet_seconds,
        )
        fleet.view_listeners.append(self._on_view)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        follower_task = None if self._is_standalone else asyncio.create_task(self._follower.run())
        try:
            yield
        finally:
            self._coordinator.stop()
            if follower_task is not None:
                follower_task.cancel()
                await asyncio.gather(follower_task, return_exceptions=True)

    async def catch_up(self) -> None:
        if not self._is_standalone:
            await self._follower.catch_up(self._settings.catch_up_seconds)

    async def activate(
        self, label: str, mode: ActivationMode, *, allow_rollback: bool
    ) -> ActivationAnswer:
        if self._is_standalone:
            return await self._activate(label, mode, allow_rollback)
        return await self._coordinator.activate(label, mode, allow_rollback=allow_rollback)

    async def _activate_unchanged(
        self, label: str, mode: ActivationMode, allow_rollback: bool
    ) -> ActivationAnswer:
        await self._follower.check_unchanged(label)
        return await self._activate(label, mode, allow_rollback)

    async def announce(self, version: Version) -> bool:
        return self._is_standalone or await self._follower.announce(version)

    async def on_deleted(self, label: str) -> None:
        if not self._is_standalone:
            await self._follower.on_deleted(label)

    def answer(self) -> VersionsAnswer:
        target = self._fleet.view.target
        return VersionsAnswer(
            active=self._versions.active.label,
            ordered=None if target is None else target.version,
            versions=[version.answer() for version in self._versions.all()],
            replicas=[self._replica_weights(replica) for replica in self._replicas()],
        )

    def skew(self) -> int:
        """Difference between the highest and the lowest active sequence of the replicas."""
        sequences = [r.sequence for r in self._replicas() if r.state != "starting"]
        return max(sequences, default=0) - min(sequences, default=0)

    def num_behind(self) -> int:
        return sum(self._versions_behind(replica) > 0 for replica in self._replicas())

    def num_failed(self) -> int:
        return sum(replica.failed is not None for replica in self._replicas())

    def _replicas(self) -> list[Replica]:
        replicas = self._fleet.view.replicas
        return [replicas[replica_id] for replica_id in sorted(replicas)]

    def _replica_weights(self, replica: Replica) -> ReplicaWeights:
        return ReplicaWeights(
            replica=replica.id,
            state=replica.state,
            version=replica.version,
            sequence=replica.sequence,
            behind=self._versions_behind(replica),
            staged=list(replica.staged),
            failed=replica.failed,
            error=replica.error,
        )

    def _versions_behind(self, replica: Replica) -> int:
        """Sequence of the target minus that of the replica's active version, at least zero."""
        view = self._fleet.view
        if view.target is None:
            return 0
        ordered = self._versions.sequence_of(view.target.version)
        return 0 if ordered is None else max(0, ordered - replica.sequence)

    def _on_view(self, view: ClusterView) -> None:
        self._versions.learn_sequences({m.version: m.sequence for m in view.manifests.values()})
