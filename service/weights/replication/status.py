"""Weight replication status: of this replica, for the cluster registry, and of all replicas."""

import logging
import time
from collections.abc import Callable

from coppice.wire.weights import ReplicaWeights, VersionsAnswer
from service.cluster.membership import ClusterMembership
from service.cluster.registry import ClusterView, Replica
from service.readiness import Readiness
from service.versions import Versions

RETRY_SECONDS = 10.0

log = logging.getLogger(__name__)


class ReplicaStatus:
    """Weight replication status that this replica publishes as its cluster registry entry.

    `epoch` is that of the last applied activation target. `failed` is the label of the version that
    could not be fetched or activated, `error` the reason. Failed versions are retried after
    `RETRY_SECONDS`.
    """

    def __init__(
        self,
        replica_id: str,
        url: str | None,
        readiness: Readiness,
        versions: Versions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica_id = replica_id
        self._url = url or ""
        self._readiness = readiness
        self._versions = versions
        self._clock = clock
        self._retry_at: dict[str, float] = {}
        self.epoch = 0
        self.failed: str | None = None
        self.error: str | None = None

    def entry(self) -> Replica:
        active = self._versions.active
        complete = [v for v in self._versions.all() if v.state != "incomplete"]
        return Replica(
            id=self._replica_id,
            url=self._url,
            state=self._readiness.state,
            version=active.label,
            sequence=active.sequence,
            epoch=self.epoch,
            holds=tuple(version.label for version in complete if version.owned),
            staged=tuple(version.label for version in complete),
            failed=self.failed,
            error=self.error,
        )

    def is_due(self, label: str) -> bool:
        """Return True unless the version was tried and failed within the last `RETRY_SECONDS`."""
        return self._clock() >= self._retry_at.get(label, -float("inf"))

    def on_failure(self, label: str, reason: str) -> None:
        log.warning("fetching or activating %s failed: %s", label, reason)
        self.failed, self.error = label, reason
        self._retry_at[label] = self._clock() + RETRY_SECONDS

    def on_success(self, label: str) -> None:
        self._retry_at.pop(label, None)
        if self.failed == label:
            self.failed = self.error = None

    def on_target_applied(self, epoch: int) -> None:
        self.epoch = epoch
        self.failed = self.error = None


class ReplicationStatus:
    """Weights versions of all replicas, according to the most recent cluster view."""

    def __init__(self, cluster: ClusterMembership, versions: Versions) -> None:
        self._cluster = cluster
        self._versions = versions
        cluster.view_listeners.append(self._on_view)

    def answer(self) -> VersionsAnswer:
        target = self._cluster.view.target
        return VersionsAnswer(
            active=self._versions.active.label,
            target_version=None if target is None else target.version,
            versions=[version.answer() for version in self._versions.all()],
            replicas=[self._replica_weights(replica) for replica in self._replicas()],
        )

    def skew(self) -> int:
        """Difference between the highest and lowest sequence number active on any replica."""
        sequences = [r.sequence for r in self._replicas() if r.state != "starting"]
        return max(sequences, default=0) - min(sequences, default=0)

    def num_behind(self) -> int:
        return sum(self._versions_behind(replica) > 0 for replica in self._replicas())

    def num_failed(self) -> int:
        return sum(replica.failed is not None for replica in self._replicas())

    def _replicas(self) -> list[Replica]:
        replicas = self._cluster.view.replicas
        return [replicas[replica_id] for replica_id in sorted(replicas)]

    def _replica_weights(self, replica: Replica) -> ReplicaWeights:
        return ReplicaWeights(
            replica=replica.id,
            state=replica.state,
            version=replica.version,
            sequence=replica.sequence,
            versions_behind=self._versions_behind(replica),
            staged=list(replica.staged),
            failed=replica.failed,
            error=replica.error,
        )

    def _versions_behind(self, replica: Replica) -> int:
        """Sequence number of the activation target minus a replica's active one, at least 0."""
        view = self._cluster.view
        if view.target is None:
            return 0
        sequence = self._versions.sequence_of(view.target.version)
        return 0 if sequence is None else max(0, sequence - replica.sequence)

    def _on_view(self, view: ClusterView) -> None:
        self._versions.learn_sequences({m.version: m.sequence for m in view.manifests.values()})
