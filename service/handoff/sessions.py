"""Agent sessions in a hand-over: offers local ones, restores received ones."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from coppice.wire.handoff import (
    STATE_VERSION,
    AgentSessionState,
    SessionsOffer,
)
from coppice.wire.sessions import SessionsFinish
from engine.protocol.info_and_health import EngineState
from service.cluster.build import Cluster
from service.cluster.idempotency_claim import IdempotencyClaim, move_key
from service.cluster.registry import Replica
from service.errors import InvalidRequest, SessionNotFound
from service.handoff.rollout_state import claim_of
from service.handoff.sender import Offer
from service.handoff.session_state import (
    RESOURCE,
    estimated_bytes,
    group_state,
    restore,
    session_state,
)
from service.rollouts.manager import RolloutManager
from service.sessions.manager import SessionManager
from service.sessions.session import Session
from service.sessions.session_group import SessionGroup

MAX_SEQUENCE_LEAD = 86_400 * 10**6
"""Largest lead of a sender's sequences, which begin at the time of its start in microseconds."""


@dataclass(kw_only=True, eq=False)
class OpenSessions:
    """Sessions of this replica by group, each offered as soon as no call of it runs.

    The sessions of a group go to the same replica. Those that no replica accepts stay open here,
    and are offered again. A group with a session whose state is too large stays here as a whole:
    its stream is one.
    """

    sessions: SessionManager
    cluster: Cluster
    candidates: Callable[[], list[Replica]]
    kind: str = "sessions"
    poll_seconds: float = 0.1
    is_repeated: bool = True
    retry_at: dict[SessionGroup, float] = field(default_factory=dict)

    def waiting(self) -> list[SessionGroup]:
        return [group for group in self.sessions.store.groups() if self._next(group)]

    def is_over(self) -> bool:
        """True if no session is open, and each group that has ended was offered."""
        store = self.sessions.store
        return not store.num_open and all(
            group.moved_to is not None or group in self.retry_at for group in store.groups()
        )

    def estimated_bytes(self, group: SessionGroup) -> int:
        if group.moved_to is not None:
            return 0
        return max(map(estimated_bytes, self.sessions.store.sessions_of(group)), default=0)

    @asynccontextmanager
    async def offer(self, group: SessionGroup) -> AsyncIterator[Offer | None]:
        """Context manager in which the sessions do not change."""
        sessions, moved_to = self._next(group), group.moved_to
        if not sessions:
            yield None
            return
        keys = [move_key(session.id) for session in sessions]
        replicas = self.candidates()
        if moved_to is None:
            keys += group.registry_keys
        else:
            replicas = [each for each in replicas if each.id == moved_to.id]
        with ExitStack() as held:
            for session in sessions:
                held.enter_context(session.moving())
            held.enter_context(self.sessions.store.offering(group))
            yield Offer(
                id=sessions[0].id,
                state=partial(self.state, group, sessions),
                keys=keys,
                replicas=replicas,
                on_accepted=partial(self._on_accepted, group, sessions, keys),
            )

    def _next(self, group: SessionGroup) -> list[Session]:
        """Sessions to offer together: first those that have ended with an open one, then one each.

        A group that waits for sessions of another replica is not offered.
        """
        sessions = self.sessions.store.sessions_of(group)
        idle = [each for each in sessions if each.can_move][:1]
        if group.remaining_ids or group.moved_to is not None:
            return [] if group.remaining_ids else idle
        return [*group.ended.sessions, *idle] if idle or not group.num_open else []

    async def state(self, group: SessionGroup, sessions: Sequence[Session]) -> SessionsOffer:
        """State of sessions of a group; it may be large and is made in a thread."""
        now, last = self.sessions.now(), self.sessions.store.last_sequence
        left, keys = list[Session](), list[str]()
        if group.moved_to is None:
            left = [s for s in self.sessions.store.sessions_of(group) if s not in sessions]
            found = map(self.sessions.addresses.key_of, group.session_ids)
            keys = [key for key in found if key is not None]
        state = group_state(group, sessions, left, keys, last_sequence=last, now=now)

        def offer() -> SessionsOffer:
            return SessionsOffer(
                state_version=STATE_VERSION,
                source=self.cluster.membership.own_id,
                owner=group.owner,
                group=state,
                sessions=[session_state(session, now) for session in sessions],
            )

        return await asyncio.to_thread(offer)

    def _on_accepted(
        self,
        group: SessionGroup,
        sessions: Sequence[Session],
        keys: Sequence[str],
        replica: Replica,
    ) -> None:
        """Redirect requests for the sessions, whose keys the replica has taken over."""
        self.cluster.idempotency_keys.handed_over(keys)
        self.sessions.store.on_moved(group, sessions, replica)
        for session in sessions:
            self.sessions.kv_releases.add(session.id)


@dataclass(frozen=True, slots=True, eq=False)
class SessionsArrival:
    """Sessions that were restored from an offer, and keys that were taken over for them.

    The group is `known` if an earlier offer has brought it here.
    """

    offer: SessionsOffer
    known: SessionGroup | None
    group: SessionGroup
    sessions: list[Session]
    keys: list[str]

    @property
    def new_claim(self) -> IdempotencyClaim | None:
        return self.group.claim if self.known is None else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionHandoff:
    """Sessions of other replicas, with the same ids, keys and trees."""

    engine: EngineState
    sessions: SessionManager
    rollouts: RolloutManager
    cluster: Cluster

    def ids(self, offer: SessionsOffer) -> list[str]:
        return [session.id for session in offer.sessions]

    def check(self, offer: SessionsOffer) -> None:
        """Refuse sessions that are here already, or that do not fit their group."""
        store, group, ids = self.sessions.store, offer.group, self.ids(offer)
        if any(store.find(session_id) is not None for session_id in ids):
            raise _invalid("sessions", "they are on this replica already")
        if any(
            store.is_of_another_group(each, offer.owner, group.id) for each in group.session_ids
        ):
            raise _invalid("group.session_ids", "a session here belongs to another group")
        if len({*ids, *group.remaining_ids}) < len(ids) + len(group.remaining_ids):
            raise _invalid("sessions", "an id is repeated")
        if {*ids, *group.remaining_ids} - {*group.session_ids}:
            raise _invalid("sessions", "they are not of the group")
        known = self._known(offer)
        if known is not None and not (known.remaining_ids >= {*ids} and known.moved_to is None):
            raise _invalid("sessions", "the group here has other sessions")
        if known is None:
            _check_new_group(offer)
        elif any(session.sequence is not None for session in offer.sessions):
            raise _invalid("sequence", "only in the first offer of a group")
        num_open = sum(session.state == "open" for session in offer.sessions)
        if num_open:
            self.rollouts.factory.check_kept_kv(group.options.keep_kv, group.options.weights)
            self.rollouts.factory.resolve(group.options.weights, group.options.adapter)
        self.sessions.check_capacity(offer.owner, num_open)

    @asynccontextmanager
    async def prepared(self, offer: SessionsOffer) -> AsyncIterator[SessionsArrival]:
        known = self._known(offer)
        group = known or _new_group(offer, self.sessions.now())
        sessions = [self.sessions.factory.session(group, each.id) for each in offer.sessions]
        await asyncio.to_thread(self._restore, sessions, offer.sessions)
        arrival = SessionsArrival(offer, known, group, sessions, [])
        try:
            yield arrival
        except BaseException:
            for key in arrival.keys:
                self.cluster.idempotency_keys.unregister(key)
            if arrival.new_claim is not None:
                self.cluster.idempotency_keys.release(arrival.new_claim)
            raise

    async def take_over_keys(self, arrival: SessionsArrival) -> None:
        """Take over the keys of the sessions and, if it is new, those of the group."""
        claim = arrival.new_claim
        if claim is not None and self.cluster.idempotency_keys.claim(claim):
            raise _invalid("key", "belongs to another group here")
        keys = [move_key(session.id) for session in arrival.sessions]
        for key in [*keys, *(arrival.group.registry_keys if arrival.known is None else ())]:
            arrival.keys.append(key)
            await self.cluster.idempotency_keys.take_over(key, arrival.offer.source)

    def add(self, arrival: SessionsArrival) -> None:
        if self._known(arrival.offer) is not arrival.known:
            raise _invalid("group", "another offer has brought it here meanwhile")
        store, group = self.sessions.store, arrival.group
        store.check_memory(sum(session.num_bytes for session in arrival.sessions))
        last_sequence = arrival.offer.group.last_sequence
        store.receive(group, arrival.sessions, last_sequence=last_sequence)
        if arrival.new_claim is not None:
            self.cluster.idempotency_keys.bind(arrival.new_claim, group.id)
        self.sessions.on_group_ended(group)

    def is_offered(self, session_id: str) -> bool:
        session = self.sessions.store.find(session_id)
        return session is not None and session.is_moving

    async def give_back(self, session_id: str) -> None:
        """Remove the sessions of an offer, which is named by the first one."""
        store = self.sessions.store
        session = store.find(session_id)
        group = None if session is None else store.group_of(session)
        if session is None or session.is_moving or group is None or group.source is None:
            raise SessionNotFound()
        is_first = session_id == group.first_received
        sessions = store.received(group) if is_first else [session]
        store.return_to_source(group, sessions)
        if is_first and group.claim is not None:
            self.cluster.idempotency_keys.release(group.claim)
        for session in sessions:
            await self.sessions.abort_calls(session)

    def _known(self, offer: SessionsOffer) -> SessionGroup | None:
        return self.sessions.store.find_group(offer.owner, offer.group.id)

    def _restore(self, sessions: Sequence[Session], states: Sequence[AgentSessionState]) -> None:
        now = self.sessions.now()
        for session, state in zip(sessions, states, strict=True):
            restore(session, state, vocab_size=self.engine.info.vocab_size)
            session.expires_at = now + min(state.seconds_left, session.options.ttl_seconds)


def _check_new_group(offer: SessionsOffer) -> None:
    group = offer.group
    if len(group.session_ids) != group.options.n or len({*group.session_ids}) != group.options.n:
        raise _invalid("group.session_ids", "needs those of all sessions")
    if len(group.keys) != group.options.n:
        raise _invalid("group.keys", "needs one per session")
    if group.last_sequence > time.time_ns() // 1000 + MAX_SEQUENCE_LEAD:
        raise _invalid("group.last_sequence", "is not of this time")
    ended = [session.sequence for session in offer.sessions if session.state != "open"]
    sequences = [sequence for sequence in ended if sequence is not None]
    if len(sequences) < len(ended) or sequences != sorted({*sequences}):
        raise _invalid("sequence", "needed for each session that has ended, in ascending order")
    if any(s.sequence is not None for s in offer.sessions if s.state == "open"):
        raise _invalid("sequence", "an open session has none")
    if max(sequences, default=0) > group.last_sequence:
        raise _invalid("group.last_sequence", "is lower than that of a session")


def _new_group(offer: SessionsOffer, now: float) -> SessionGroup:
    group = offer.group
    num_open = sum(session.state == "open" for session in offer.sessions)
    return SessionGroup(
        id=group.id,
        owner=offer.owner,
        options=group.options,
        session_ids=group.session_ids,
        finish=group.options.finish or SessionsFinish(),
        deadline=None if group.seconds_left is None else now + group.seconds_left,
        claim=claim_of(offer, group.key, RESOURCE),
        num_open=num_open + len(group.remaining_ids),
        num_kept=len(offer.sessions) + len(group.remaining_ids),
        num_finished=group.num_finished,
        keys=dict(zip(group.session_ids, group.keys, strict=True)),
        remaining_ids=set(group.remaining_ids),
        source=offer.source,
        first_received=offer.sessions[0].id,
    )


def _invalid(name: str, message: str) -> InvalidRequest:
    return InvalidRequest.of_parameter(name, message)
