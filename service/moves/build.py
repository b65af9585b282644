"""Composition of the moves of rollouts and sessions between replicas."""

from dataclasses import dataclass

from engine.protocol import Engine
from service.cluster.build import Cluster
from service.config.allowed_peers import Peers
from service.config.settings import Settings
from service.moves.receiver import MoveReceiver
from service.moves.sender import MoveSender
from service.moves.session_receiver import SessionReceiver
from service.moves.session_sender import SessionSender
from service.observability.metrics import Metrics
from service.rollouts.build import Rollouts
from service.sessions.manager import SessionManager
from service.versions import Versions
from service.weights.build import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Both sides of the moves of rollouts and of sessions."""

    receiver: MoveReceiver
    sender: MoveSender
    session_receiver: SessionReceiver
    session_sender: SessionSender


def build_moves(
    settings: Settings,
    engine: Engine,
    metrics: Metrics,
    versions: Versions,
    cluster: Cluster,
    rollouts: Rollouts,
    sessions: SessionManager,
    weights: Weights,
) -> Moves:
    fleet, keys, manager = cluster.membership, cluster.idempotency_keys, rollouts.manager
    peers = Peers(settings.weights.peers, settings.weights.peer_key_file)
    max_bytes = settings.limits.max_body_bytes
    return Moves(
        receiver=MoveReceiver(
            engine,
            versions,
            rollouts.admission,
            rollouts.group_factory,
            manager,
            fleet,
            keys,
            weights.activation,
        ),
        sender=MoveSender(
            engine,
            versions,
            rollouts.admission,
            manager,
            fleet,
            keys,
            peers,
            metrics.cluster,
            max_bytes=max_bytes,
        ),
        session_receiver=SessionReceiver(engine, sessions, manager, fleet, keys),
        session_sender=SessionSender(
            sessions, fleet, keys, peers, metrics.sessions, max_bytes=max_bytes
        ),
    )
