"""Weights version of each replica, and counts of lagging and failed replicas."""

from coppice.wire.weights import ReplicaWeights, VersionsAnswer
from service.cluster.membership import ClusterMembership
from service.cluster.registry import Replica
from service.weights_versions import Versions


class ReplicationStatus:
    """Weights versions of all replicas, according to the most recent cluster view."""

    def __init__(self, cluster: ClusterMembership, versions: Versions) -> None:
        self._cluster = cluster
        self._versions = versions

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
