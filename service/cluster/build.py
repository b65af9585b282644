"""Construction of the cluster components: registry client, membership and idempotency keys."""

from dataclasses import dataclass

from service.cluster.idempotency_keys import IdempotencyKeys
from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.membership import ClusterMembership
from service.cluster.redis_registry import RedisRegistry
from service.cluster.registry import ClusterRegistry, new_replica_id
from service.cluster.replica_status import ReplicaStatus
from service.config.cluster import ClusterSettings
from service.config.settings import Settings
from service.observability.metrics import ClusterMetrics
from service.readiness import Readiness
from service.weights_versions import Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """This replica's part of the cluster."""

    membership: ClusterMembership
    replica_status: ReplicaStatus
    idempotency_keys: IdempotencyKeys


def build_cluster(
    settings: Settings,
    metrics: ClusterMetrics,
    readiness: Readiness,
    versions: Versions,
    registry: ClusterRegistry | None,
) -> Cluster:
    """Create the components. A `registry` that is given is shared with servers of this process."""
    replica_status = ReplicaStatus(
        new_replica_id(), settings.server.advertised_url, readiness, versions
    )
    membership = ClusterMembership(
        registry or _own_registry(settings.cluster),
        settings.cluster,
        metrics,
        describe=replica_status.entry,
        is_standalone=registry is None and settings.cluster.redis_url is None,
    )
    return Cluster(
        membership=membership,
        replica_status=replica_status,
        idempotency_keys=IdempotencyKeys(
            membership, metrics, max_seconds=settings.limits.keep_answers_seconds
        ),
    )


def _own_registry(settings: ClusterSettings) -> ClusterRegistry:
    return InMemoryRegistry() if settings.redis_url is None else RedisRegistry(settings)
