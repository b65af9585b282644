"""Construction of the weights components: staging, activation, and replication in the cluster."""

from dataclasses import dataclass

from engine.protocol import Engine
from service.checkpoint_store import CheckpointStore
from service.cluster.build import Cluster
from service.config.settings import Settings
from service.kv.build import Kv
from service.observability.metrics import Metrics
from service.rollouts.build import Rollouts
from service.uncancellable_tasks import StateChanges
from service.weights.activation import Activation
from service.weights.drafter import DrafterManager
from service.weights.gpu_memory_transfers import WeightTransfers
from service.weights.replication.announcer import Announcer
from service.weights.replication.coordinator import ActivationCoordinator
from service.weights.replication.downloads import Downloads
from service.weights.replication.reconciler import Reconciler
from service.weights.replication.status import ReplicationStatus
from service.weights.stager import WeightStager
from service.weights_versions import Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights versions of this replica and of the cluster, and the drafter."""

    stager: WeightStager
    drafters: DrafterManager
    activation: Activation
    reconciler: Reconciler
    coordinator: ActivationCoordinator
    transfers: WeightTransfers
    replication: ReplicationStatus


def build_weights(
    settings: Settings,
    engine: Engine,
    metrics: Metrics,
    versions: Versions,
    checkpoints: CheckpointStore,
    changes: StateChanges,
    cluster: Cluster,
    kv: Kv,
    rollouts: Rollouts,
) -> Weights:
    fleet, status, stored = cluster.membership, cluster.replica_status, settings.weights
    announcer = Announcer(fleet, versions, status)
    stager = WeightStager(engine, versions, checkpoints, announcer, metrics.weights, stored)
    activation = Activation(
        engine,
        versions,
        stager,
        rollouts.manager,
        kv.prompt_kv,
        announcer,
        changes,
        metrics,
        max_lease_seconds=settings.limits.max_lease_seconds,
    )
    downloads = Downloads(fleet, versions, stager, checkpoints, status, stored, metrics.weights)
    reconciler = Reconciler(fleet, versions, stager, downloads, announcer, activation, status)
    coordinator = ActivationCoordinator(fleet, versions, activation, reconciler, changes, stored)
    return Weights(
        stager=stager,
        drafters=DrafterManager(engine, checkpoints),
        activation=activation,
        reconciler=reconciler,
        coordinator=coordinator,
        transfers=WeightTransfers(versions, stager, activation, changes),
        replication=ReplicationStatus(fleet, versions),
    )
