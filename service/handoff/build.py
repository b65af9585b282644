"""Construction of the components that hand rollouts and sessions over between replicas."""

from dataclasses import dataclass

from engine.protocol import Engine
from service.cluster.build import Cluster
from service.config.allowed_peers import Peers
from service.config.settings import Settings
from service.handoff.receiver import HandoffReceiver
from service.handoff.rollouts import Results, RolloutHandoff, RunningRollouts
from service.handoff.sender import HandoffSender
from service.handoff.sessions import OpenSessions, SessionHandoff
from service.observability.metrics import Metrics
from service.rollouts.build import Rollouts
from service.sessions.manager import SessionManager
from service.weights.build import Weights
from service.weights_versions import Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """Both sides of the hand-over, and the work of each kind."""

    sender: HandoffSender
    running: RunningRollouts
    results: Results
    open_sessions: OpenSessions
    receiver: HandoffReceiver
    rollouts: RolloutHandoff
    sessions: SessionHandoff


def build_handoff(
    settings: Settings,
    engine: Engine,
    metrics: Metrics,
    versions: Versions,
    cluster: Cluster,
    rollouts: Rollouts,
    sessions: SessionManager,
    weights: Weights,
) -> Handoff:
    peers = Peers(settings.weights.peers, settings.weights.peer_key_file)
    max_bytes = settings.limits.max_body_bytes
    sender = HandoffSender(cluster, peers, metrics.cluster, max_bytes=max_bytes)
    of_rollouts = RolloutHandoff(
        engine=engine,
        versions=versions,
        rollouts=rollouts,
        cluster=cluster,
        activation=weights.activation,
        candidates=sender.candidates,
    )
    of_sessions = SessionHandoff(
        engine=engine, sessions=sessions, rollouts=rollouts.manager, cluster=cluster
    )
    return Handoff(
        sender=sender,
        running=RunningRollouts(handoff=of_rollouts),
        results=Results(handoff=of_rollouts),
        open_sessions=OpenSessions(
            sessions=sessions, cluster=cluster, candidates=sender.candidates
        ),
        receiver=HandoffReceiver(cluster.membership),
        rollouts=of_rollouts,
        sessions=of_sessions,
    )
