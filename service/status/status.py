"""Status of the server and its components, for GET /v1/status and Prometheus gauges."""

from collections.abc import Callable

from coppice.wire.status import EngineStatus, StartPhase, StatusAnswer
from engine.protocol.info_and_health import EngineState
from engine.protocol.optional_features import DRAFT_MODEL
from engine.types.feature_stats import (
    CudaGraphStats,
    KeptKvStats,
    KvRetentionStats,
    SharedPrefixStats,
    SpeculationStats,
)
from engine.types.info import EngineHealth
from service import __version__
from service.cluster.membership import ClusterMembership
from service.errors import ServiceError
from service.kv.spans.manager import KvReuseManager
from service.observability.kv_metrics import KvReuseMetrics
from service.observability.metrics import ClusterMetrics, WeightMetrics
from service.server import Server
from service.status.features import features


def status(server: Server) -> StatusAnswer:
    active = server.versions.active
    started, health = server.readiness.started, server.engine.health()
    return StatusAnswer(
        version=__version__,
        stage=health.stage,
        start_phase=_start_phase(health),
        paused=server.activation.pauses.paused,
        pause_lease_seconds=server.activation.pauses.seconds_left,
        sleep_level=server.activation.sleep.level,
        sleeping_tags=sorted(server.activation.sleep.tags),
        weights_version=active.label,
        weights_sequence=active.sequence,
        num_rollouts_running=server.rollouts.num_running,
        num_samples_running=server.rollouts.num_samples_running,
        uptime_seconds=server.uptime_seconds,
        engine=_engine_status(server.engine) if started else None,
        kv=server.prompt_kv.status() if started else None,
        features=features(server) if started else [],
    )


def update_gauges(server: Server) -> None:
    """Update all gauges, and the counters of engine events, right before metrics are exported.

    Counters of events in the service are incremented when the events happen.
    """
    health = server.engine.health()
    metrics, readiness = server.metrics, server.readiness
    metrics.server.ready.set(_succeeds(readiness.check_ready))
    metrics.server.live.set(_succeeds(readiness.check_alive))
    metrics.server.draining.set(readiness.draining)
    metrics.server.paused.set(server.activation.pauses.paused)
    metrics.server.sleep_level.set(server.activation.sleep.level)
    metrics.server.engine_up.set(readiness.started and health.alive)
    metrics.server.heartbeat_age.set(health.age_seconds)
    metrics.rollouts.rollouts_running.set(server.rollouts.num_running)
    metrics.sessions.open.set(server.sessions.num_open)
    metrics.sessions.bytes.set(server.sessions.num_bytes)
    metrics.rollouts.samples_running.set(server.rollouts.num_samples_running)
    metrics.rollouts.samples_admitted.set(server.admission.num_samples)
    metrics.rollouts.samples_limit.set(server.settings.limits.max_samples_running)
    _update_weights(metrics.weights, server)
    metrics.prompt_kv.update(server.prompt_kv.status())
    metrics.prompt_kv.transfers.set(server.kv_downloads.num_open)
    _update_kv_reuse(metrics.kv_reuse, server.kv_reuse)
    _update_cluster(metrics.cluster, server.cluster)
    metrics.attention.update(server.engine.stats(SharedPrefixStats))
    metrics.kept_kv.update(server.engine.stats(KeptKvStats))
    metrics.graphs.update(server.engine.stats(CudaGraphStats))
    metrics.session_kv.update(server.engine.stats(KvRetentionStats))
    metrics.speculation.update(server.engine.stats(SpeculationStats))
    if (drafter := server.engine.feature(DRAFT_MODEL)) is not None:
        metrics.drafter.update(drafter.status())


def _update_weights(metrics: WeightMetrics, server: Server) -> None:
    metrics.sequence.set(server.versions.active.sequence)
    metrics.age.set(server.versions.active_seconds)
    metrics.adapters.set(server.adapters.num_loaded)
    metrics.skew.set(server.replication.skew())
    metrics.replicas_behind.set(server.replication.num_behind())
    metrics.replicas_failed.set(server.replication.num_failed())


def _update_kv_reuse(metrics: KvReuseMetrics, kv_reuse: KvReuseManager) -> None:
    cache, observations = kv_reuse.spans, kv_reuse.observations
    metrics.observations.set(observations.num_observations)
    metrics.spans.set(cache.num_spans)
    metrics.bytes.set(cache.num_bytes)
    metrics.observation_outcomes.update_all(observations.num_by_outcome)


def _update_cluster(metrics: ClusterMetrics, cluster: ClusterMembership) -> None:
    metrics.up.set(not cluster.unavailable)
    metrics.settled.set(cluster.is_settled)
    metrics.heartbeat_age.set(cluster.contact_age_seconds)
    metrics.replicas.set(len(cluster.view.replicas))


def _start_phase(health: EngineHealth) -> StartPhase | None:
    phase = health.start_phase
    return None if phase is None else StartPhase.model_validate(phase, from_attributes=True)


def _engine_status(engine: EngineState) -> EngineStatus:
    shown = EngineStatus.model_fields.keys()
    return EngineStatus.model_validate({name: getattr(engine.info, name) for name in shown})


def _succeeds(check: Callable[[], object]) -> bool:
    try:
        check()
    except ServiceError:
        return False
    return True
