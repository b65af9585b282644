"""Composition of the hand-over of rollouts and sessions between replicas."""

from dataclasses import dataclass

from engine.protocol import Engine
from service.cluster.build import Cluster
from service.config.allowed_peers import Peers
from service.config.settings import Settings
from service.handoff.receiver import HandoffReceiver
from service.handoff.rollouts import Results, RolloutArrivals, RolloutOffers, RunningRollouts
from service.handoff.sender import HandoffSender
from service.handoff.sessions import OpenSessions, SessionArrivals
from service.observability.metrics import Metrics
from service.rollouts.build import Rollouts
from service.sessions.manager import SessionManager
from service.versions import Versions
from service.weights.build import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """Both sides of the hand-over, and the work of each kind."""

    sender: HandoffSender
    running: RunningRollouts
    results: Results
    open_sessions: OpenSessions
    receiver: HandoffReceiver
    rollouts: RolloutArrivals
    sessions: SessionArrivals


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
    fleet, transfers, manager = cluster.membership, cluster.key_transfers, rollouts.manager
    sender = HandoffSender(
        fleet,
        transfers,
        Peers(settings.weights.peers, settings.weights.peer_key_file),
        metrics.cluster,
        max_bytes=settings.limits.max_body_bytes,
    )
    offers = RolloutOffers(
        engine=engine,
        versions=versions,
        rollouts=manager,
        cluster_id=fleet.own_id,
        candidates=sender.candidates,
    )
    return Handoff(
        sender=sender,
        running=RunningRollouts(offers, rollouts.admission),
        results=Results(offers),
        open_sessions=OpenSessions(sessions, fleet, sender.candidates),
        receiver=HandoffReceiver(transfers),
        rollouts=RolloutArrivals(
            engine=engine,
            versions=versions,
            admission=rollouts.admission,
            group_factory=rollouts.group_factory,
            rollouts=manager,
            transfers=transfers,
            activation=weights.activation,
        ),
        sessions=SessionArrivals(
            engine=engine,
            sessions=sessions,
            rollouts=manager,
            cluster=fleet,
            transfers=transfers,
        ),
    )
