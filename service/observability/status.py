"""What a server does just now, as it is told to callers and to Prometheus."""

from collections.abc import Callable

from coppice.wire.control import EngineStatus, StatusAnswer
from engine.protocol import Engine
from service import __version__
from service.http.errors import ServiceError
from service.server import Server


def status(server: Server) -> StatusAnswer:
    active = server.versions.active
    started = server.readiness.started
    return StatusAnswer(
        version=__version__,
        stage=server.engine.pulse().stage,
        paused=server.activation.paused,
        weights_version=active.label,
        weights_sequence=active.sequence,
        rollouts_running=server.rollouts.num_running,
        samples_running=server.rollouts.num_samples_running,
        uptime_seconds=server.uptime_seconds,
        engine=_engine_status(server.engine) if started else None,
        kv=server.prompt_kv.status() if started else None,
    )


def observe(server: Server) -> None:
    """Levels are read when they are asked for, counters are counted when things happen."""
    pulse = server.engine.pulse()
    metrics, readiness = server.metrics, server.readiness
    metrics.rollouts_running.set(server.rollouts.num_running)
    metrics.samples_running.set(server.rollouts.num_samples_running)
    metrics.samples_admitted.set(server.admission.num_samples)
    metrics.samples_limit.set(server.settings.limits.max_samples_running)
    metrics.connections.observed(server.callers, server.operators)
    metrics.paused.set(server.activation.paused)
    metrics.draining.set(readiness.draining)
    metrics.ready.set(_passes(readiness.check_ready))
    metrics.live.set(_passes(readiness.check_alive))
    metrics.weights_sequence.set(server.versions.active.sequence)
    metrics.adapters.set(server.adapters.num_held)
    metrics.engine_up.set(readiness.started and pulse.alive)
    metrics.heartbeat_age.set(pulse.age_seconds)
    metrics.kv_observed(server.prompt_kv.status())
    metrics.kv_transfers.set(server.sending.num_transfers)
    metrics.kv_transfers_limit.set(server.settings.kv.max_transfers)
    metrics.reuse.observed(server.segments.store, server.segments.anchors)
    metrics.fleet_observed(server.fleet)
    metrics.fleet_weights_observed(server.fleet_weights)
    metrics.attention_counted(server.engine.shared_prefix())
    metrics.speculation.counted(server.engine.speculation())
    metrics.graphs_counted(server.engine.graphs())
    metrics.drafter.observed(server.engine.drafter())


def _engine_status(engine: Engine) -> EngineStatus:
    shown = EngineStatus.model_fields.keys()
    return EngineStatus.model_validate({name: getattr(engine.facts, name) for name in shown})


def _passes(check: Callable[[], object]) -> bool:
    try:
        check()
    except ServiceError:
        return False
    return True
