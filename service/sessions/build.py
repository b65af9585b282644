"""Construction of the agent-session components around the session manager."""

from engine.protocol import Engine
from service.cluster.build import Cluster
from service.config.settings import Settings
from service.http.build import Http
from service.observability.session_metrics import SessionMetrics
from service.rollouts.build import Rollouts
from service.sessions.manager import SessionManager


def build_sessions(
    settings: Settings,
    engine: Engine,
    metrics: SessionMetrics,
    http: Http,
    cluster: Cluster,
    rollouts: Rollouts,
) -> SessionManager:
    return SessionManager(
        settings.sessions,
        rollouts.manager,
        rollouts.tokenizer,
        http.threads,
        cluster.membership,
        cluster.idempotency_keys,
        metrics,
        admission=rollouts.admission,
        advertised_url=settings.server.advertised_url,
        keep_seconds=settings.limits.keep_answers_seconds,
        release_kv=engine.release_session_kv,
    )
