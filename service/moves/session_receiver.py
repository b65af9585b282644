"""Receiving side of a move of sessions: agents continue their sessions of another replica here."""

import asyncio
import time
from collections.abc import Callable, Iterable

from coppice.wire.session_moves import MovedSession, MovedSessionGroup, MovedSessions
from coppice.wire.sessions import SessionsFinish
from engine.protocol.engine_state import EngineState
from service.cluster.idempotency_claim import IdempotencyClaim, move_key
from service.cluster.idempotency_keys import IdempotencyKeys
from service.cluster.membership import ClusterMembership
from service.errors import InvalidRequest, SessionNotFound
from service.moves.cancelled_moves import CancelledMoves
from service.moves.session_state import RESOURCE, restore
from service.rollouts.manager import RolloutManager
from service.sessions.manager import SessionManager
from service.sessions.session import Session
from service.sessions.session_group import SessionGroup

MAX_SEQUENCE_LEAD = 86_400 * 10**6
"""Largest lead of a sender's sequences, which begin at the time of its start in microseconds."""


class SessionReceiver:
    """Continues sessions that other replicas send, with the same ids, keys and trees.

    A refused request leaves nothing here: the sender tries the next replica.
    """

    def __init__(
        self,
        engine: EngineState,
        sessions: SessionManager,
        rollouts: RolloutManager,
        cluster: ClusterMembership,
        keys: IdempotencyKeys,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._rollouts = rollouts
        self._cluster = cluster
        self._keys = keys
        self._cancelled = CancelledMoves(clock)

    async def receive(self, state: MovedSessions) -> str:
        """Continue sessions; raises a ServiceError if they cannot continue here."""
        await self._cluster.check_source(state.source)
        known = self._check(state)
        group = known or _new_group(state, self._sessions.now())
        sessions = [self._sessions.factory.session(group, each.id) for each in state.sessions]
        await asyncio.to_thread(self._restore, sessions, state.sessions)
        await self._add(state, known, group, sessions)
        return sessions[0].id

    async def _add(
        self,
        state: MovedSessions,
        known: SessionGroup | None,
        group: SessionGroup,
        sessions: list[Session],
    ) -> None:
        """Take over the keys of restored sessions, and add the sessions."""
        taken = await self._take_over(state, group, is_new=known is None)
        try:
            if self._check(state) is not known:
                raise _invalid("group", "it was moved here meanwhile")
            self._check_memory(sessions)
        except BaseException:
            self._release(taken, group, is_new=known is None)
            raise
        self._sessions.store.receive(group, sessions, last_sequence=state.group.last_sequence)
        if known is None and group.claim is not None:
            self._keys.bind(group.claim, group.id)
        self._sessions.on_group_ended(group)

    async def cancel(self, session_id: str) -> None:
        """Remove the sessions of a request whose sender did not receive the response.

        They are named by the first one. A request with them that arrives later is refused.
        A load balancer may deliver the request to the sender itself, which keeps the sessions.
        """
        session = self._sessions.store.find(session_id)
        if session is not None and session.is_moving:
            raise SessionNotFound()
        self._cancelled.add(session_id)
        store = self._sessions.store
        group = None if session is None else store.group_of(session)
        if session is None or group is None or group.source is None:
            raise SessionNotFound()
        is_first = session_id == group.first_received
        sessions = store.received(group) if is_first else [session]
        store.return_to_source(group, sessions)
        if is_first and group.claim is not None:
            self._keys.release(group.claim)
        for session in sessions:
            await self._sessions.abort_calls(session)

    def _known(self, state: MovedSessions) -> SessionGroup | None:
        return self._sessions.store.find_group(state.owner, state.group.id)

    def _check(self, state: MovedSessions) -> SessionGroup | None:
        """Refuse sessions that are here already, or that do not fit their group.

        Returns the group if an earlier request has moved it here.
        """
        store, group = self._sessions.store, state.group
        ids = [session.id for session in state.sessions]
        if any(session_id in self._cancelled for session_id in ids):
            raise _invalid("sessions", "the source has cancelled the move")
        if any(store.find(session_id) is not None for session_id in ids):
            raise _invalid("sessions", "they are on this replica already")
        if any(
            store.is_of_another_group(each, state.owner, group.id) for each in group.session_ids
        ):
            raise _invalid("group.session_ids", "a session here belongs to another group")
        if len({*ids, *group.remaining_ids}) < len(ids) + len(group.remaining_ids):
            raise _invalid("sessions", "an id is repeated")
        if {*ids, *group.remaining_ids} - {*group.session_ids}:
            raise _invalid("sessions", "they are not of the group")
        known = store.find_group(state.owner, group.id)
        if known is not None and not (known.remaining_ids >= {*ids} and known.moved_to is None):
            raise _invalid("sessions", "the group here has other sessions")
        if known is None:
            _check_new_group(state)
        elif any(session.sequence is not None for session in state.sessions):
            raise _invalid("sequence", "only in the first request for a group")
        self._check_options(state)
        return known

    def _check_options(self, state: MovedSessions) -> None:
        options, states = state.group.options, [session.state for session in state.sessions]
        num_open = states.count("open")
        if num_open:
            self._rollouts.factory.check_kept_kv(options.keep_kv, options.weights)
            self._rollouts.factory.resolve(options.weights, options.adapter)
        self._sessions.check_capacity(state.owner, num_open)

    def _restore(self, sessions: Iterable[Session], states: Iterable[MovedSession]) -> None:
        now = self._sessions.now()
        for session, state in zip(sessions, states, strict=True):
            restore(session, state, vocab_size=self._engine.info.vocab_size)
            session.expires_at = now + min(state.seconds_left, session.options.ttl_seconds)

    def _check_memory(self, sessions: Iterable[Session]) -> None:
        num_bytes = sum(session.num_bytes for session in sessions)
        self._sessions.store.check_memory(num_bytes)

    async def _take_over(
        self, state: MovedSessions, group: SessionGroup, *, is_new: bool
    ) -> list[str]:
        """Take over the keys of the sessions and, if it is new, those of the group."""
        registry_keys = [move_key(session.id) for session in state.sessions]
        registry_keys += group.registry_keys if is_new else []
        if is_new and group.claim is not None and self._keys.claim(group.claim):
            raise _invalid("key", "belongs to another group here")
        taken = list[str]()
        try:
            for key in registry_keys:
                taken.append(key)
                await self._keys.take_over(key, state.source)
        except BaseException:
            self._release(taken, group, is_new=is_new)
            raise
        return taken

    def _release(self, taken: list[str], group: SessionGroup, *, is_new: bool) -> None:
        for key in taken:
            self._keys.unregister(key)
        if is_new and group.claim is not None:
            self._keys.release(group.claim)


def _check_new_group(state: MovedSessions) -> None:
    group = state.group
    if len(group.session_ids) != group.options.n or len({*group.session_ids}) != group.options.n:
        raise _invalid("group.session_ids", "needs those of all sessions")
    if len(group.keys) != group.options.n:
        raise _invalid("group.keys", "needs one per session")
    if group.last_sequence > time.time_ns() // 1000 + MAX_SEQUENCE_LEAD:
        raise _invalid("group.last_sequence", "is not of this time")
    ended = [session.sequence for session in state.sessions if session.state != "open"]
    sequences = [sequence for sequence in ended if sequence is not None]
    if len(sequences) < len(ended) or sequences != sorted({*sequences}):
        raise _invalid("sequence", "needed for each session that has ended, in ascending order")
    if any(s.sequence is not None for s in state.sessions if s.state == "open"):
        raise _invalid("sequence", "an open session has none")
    if max(sequences, default=0) > group.last_sequence:
        raise _invalid("group.last_sequence", "is lower than that of a session")


def _new_group(state: MovedSessions, now: float) -> SessionGroup:
    group = state.group
    num_open = sum(session.state == "open" for session in state.sessions)
    return SessionGroup(
        id=group.id,
        owner=state.owner,
        options=group.options,
        session_ids=group.session_ids,
        finish=group.options.finish or SessionsFinish(),
        deadline=None if group.seconds_left is None else now + group.seconds_left,
        claim=_claim(state.owner, group),
        num_open=num_open + len(group.remaining_ids),
        num_kept=len(state.sessions) + len(group.remaining_ids),
        num_finished=group.num_finished,
        keys=dict(zip(group.session_ids, group.keys, strict=True)),
        remaining_ids=set(group.remaining_ids),
        source=state.source,
        first_received=state.sessions[0].id,
    )


def _claim(owner: str, group: MovedSessionGroup) -> IdempotencyClaim | None:
    if group.key is None:
        return None
    digest = bytes.fromhex(group.key.fingerprint)
    return IdempotencyClaim(owner, f"{RESOURCE}\n{group.key.key}", digest)


def _invalid(name: str, message: str) -> InvalidRequest:
    return InvalidRequest.of_parameter(name, message)
