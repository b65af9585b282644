"""Construction of the rollout components: admission, tokenizer, scoring and rollout manager."""

from dataclasses import dataclass

from engine.protocol import Engine
from service.adapters.adapter_files import AdapterFiles
from service.adapters.manager import AdapterManager
from service.checkpoint_store import CheckpointStore
from service.cluster.build import Cluster
from service.config.settings import Settings
from service.kv.build import Kv
from service.observability.build import Observability
from service.rollouts.admission import Admission
from service.rollouts.fairness import PriorityAging
from service.rollouts.groups.factory import GroupFactory
from service.rollouts.manager import RolloutManager
from service.rollouts.rollout_factory import RolloutFactory
from service.rollouts.scoring import Scoring
from service.rollouts.tokenizer import Tokenizer
from service.rollouts.trees.external_tree import ExternalTrees
from service.weights_versions import Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Rollouts, scores, and the adapters that both use."""

    adapters: AdapterManager
    tokenizer: Tokenizer
    admission: Admission
    group_factory: GroupFactory
    manager: RolloutManager
    external_trees: ExternalTrees
    scoring: Scoring


def build_rollouts(
    settings: Settings,
    engine: Engine,
    observability: Observability,
    versions: Versions,
    checkpoints: CheckpointStore,
    cluster: Cluster,
    kv: Kv,
) -> Rollouts:
    limits, metrics = settings.limits, observability.metrics.weights
    files = AdapterFiles(checkpoints, max_bytes=settings.weights.max_upload_bytes)
    adapters = AdapterManager(engine, files, metrics)
    tokenizer, admission, aging = Tokenizer(engine), Admission(limits), PriorityAging()
    lease_seconds = limits.max_lease_seconds
    group_factory = GroupFactory(
        engine, tokenizer, aging, kv.kv_reuse, max_lease_seconds=lease_seconds
    )
    factory = RolloutFactory(
        engine,
        versions,
        tokenizer,
        adapters,
        group_factory,
        limits,
        replica_id=cluster.membership.own_id,
    )
    manager = RolloutManager(
        engine,
        kv.prompt_kv,
        cluster.idempotency_keys,
        adapters,
        admission,
        factory,
        observability,
        limits,
    )
    return Rollouts(
        adapters=adapters,
        tokenizer=tokenizer,
        admission=admission,
        group_factory=group_factory,
        manager=manager,
        external_trees=ExternalTrees(manager),
        scoring=Scoring(engine, versions, tokenizer, manager, adapters, admission),
    )
