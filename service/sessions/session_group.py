"""Group of sessions created by one request, and the ordered list of ended sessions."""

import asyncio
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from coppice.wire.sessions import SessionsEndRecord, SessionsFinish, SessionsRequest
from service.cluster.idempotency_claim import IdempotencyClaim, move_key
from service.cluster.registry import Replica
from service.sessions.session import Session


@dataclass(slots=True, eq=False)
class EndedSessions:
    """Ended sessions of one API key or group, in the order of their sequence.

    `changed` is set at the next end. So an end wakes only the streams that send the session.
    """

    sessions: list[Session] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, session: Session) -> None:
        self.sessions.append(session)
        self.notify()

    def notify(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def after(self, sequence: int) -> list[Session]:
        return self.sessions[bisect_right(self.sessions, sequence, key=sequence_of) :]


@dataclass(slots=True, kw_only=True, eq=False)
class SessionGroup:
    """The sessions of one request. `num_kept` counts those that are open or cached.

    While a draining replica moves a group, the receiver gets the sessions in `remaining_ids` from
    `source` later, and counts them as open; `first_received` is the first of the others. On the
    sender `moved_to` is the receiver, and `is_offered` is true until it has accepted the group.
    `keys` are those of sessions that another replica created.
    """

    id: str
    owner: str
    options: SessionsRequest
    session_ids: list[str]
    finish: SessionsFinish
    deadline: float | None
    claim: IdempotencyClaim | None
    num_open: int
    num_kept: int
    num_finished: int = 0
    ended: EndedSessions = field(default_factory=EndedSessions)
    keys: Mapping[str, str] = field(default_factory=dict)
    remaining_ids: set[str] = field(default_factory=set)
    source: str | None = None
    first_received: str | None = None
    moved_to: Replica | None = None
    is_offered: bool = False

    @property
    def registry_keys(self) -> list[str]:
        """Keys in the cluster registry that name the replica of the group."""
        claims = [] if self.claim is None else [self.claim.registry_key]
        return [move_key(self.id, self.owner), *claims]

    @property
    def has_finished(self) -> bool:
        """True if as many sessions have finished as the group needs."""
        return self.num_finished >= (self.finish.num_sessions or math.inf)


def sequence_of(session: Session) -> int:
    assert session.sequence is not None, "the session has ended"
    return session.sequence


def end_record(group: SessionGroup) -> SessionsEndRecord:
    return SessionsEndRecord(
        num_sessions=len(group.session_ids),
        num_finished=group.num_finished,
        num_dropped=len(group.session_ids) - group.num_kept,
    )
