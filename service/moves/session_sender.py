"""Sending side of a move of sessions: a draining replica sends its sessions to other replicas."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack

import httpx

from service.cluster.idempotency_claim import move_key
from service.cluster.idempotency_keys import IdempotencyKeys
from service.cluster.membership import ClusterMembership
from service.cluster.registry import Replica
from service.config.allowed_peers import Peers
from service.moves.peers import MovePeers, is_accepted_by
from service.moves.sender import CONCURRENT_MOVES
from service.moves.session_state import encoded, estimated_bytes, moved_group
from service.observability.session_metrics import SessionMetrics
from service.sessions.manager import SessionManager
from service.sessions.session import Session
from service.sessions.session_group import SessionGroup

PATH = "/v1/moves/sessions"
POLL_SECONDS = 0.1
OFFER_SECONDS = 10.0
RETRY_SECONDS = 2.0

log = logging.getLogger(__name__)


class SessionSender:
    """Moves the sessions of this replica to other replicas, each as soon as no call of it runs.

    The sessions of a group go to the same replica. Those that no replica accepts stay open here,
    and are offered again after `RETRY_SECONDS`. A group with a session whose state is larger than
    `max_bytes` is kept.
    """

    def __init__(
        self,
        sessions: SessionManager,
        cluster: ClusterMembership,
        keys: IdempotencyKeys,
        allowed: Peers,
        metrics: SessionMetrics,
        *,
        max_bytes: int,
        client: type[httpx.AsyncClient] = httpx.AsyncClient,
    ) -> None:
        self._sessions = sessions
        self._cluster = cluster
        self._keys = keys
        self._peers = MovePeers(cluster, allowed, client)
        self._max_bytes = max_bytes
        self._outcomes = metrics.moves
        self._slots = asyncio.Semaphore(CONCURRENT_MOVES)
        self._busy: set[SessionGroup] = set()
        self._retry_at: dict[SessionGroup, float] = {}
        self._too_large: set[SessionGroup] = set()

    async def send_all(self) -> None:
        """Move all sessions; returns when none is open here, or if nothing can be moved."""
        if self._cluster.is_standalone or not self._sessions.store.groups():
            return
        connect = self._peers.connect()
        if connect is None:
            return
        async with connect() as http, asyncio.TaskGroup() as tasks:
            while self._busy or self._is_waiting():
                for group in self._due():
                    self._busy.add(group)
                    tasks.create_task(self._send_group(http, group))
                await asyncio.sleep(POLL_SECONDS)

    def _is_waiting(self) -> bool:
        """True if sessions are open, or a group has ended that was not offered yet."""
        store = self._sessions.store
        return bool(store.num_open) or any(
            group.moved_to is None and group not in self._retry_at for group in store.groups()
        )

    def _due(self) -> list[SessionGroup]:
        """Groups of which sessions can be sent now."""
        now = asyncio.get_running_loop().time()
        return [
            group
            for group in self._sessions.store.groups()
            if group not in self._busy
            and self._retry_at.get(group, 0.0) <= now
            and self._next(group)
        ]

    def _next(self, group: SessionGroup) -> list[Session]:
        """Sessions to send together: first those that have ended with an open one, then one each.

        A group that waits for sessions of another replica is not moved.
        """
        sessions = self._sessions.store.sessions_of(group)
        movable = [each for each in sessions if each.can_move][:1]
        if group in self._too_large:
            return []
        if group.remaining_ids or group.moved_to is not None:
            return [] if group.remaining_ids else movable
        return [*group.ended.sessions, *movable] if movable or not group.num_open else []

    async def _send_group(self, http: httpx.AsyncClient, group: SessionGroup) -> None:
        """Send the sessions of a group without running calls, until one is refused."""
        try:
            async with self._slots:
                while sessions := self._next(group):
                    if not await self._try_to_send(http, group, sessions):
                        now = asyncio.get_running_loop().time()
                        self._retry_at[group] = now + RETRY_SECONDS
                        return
        finally:
            self._busy.discard(group)

    async def _try_to_send(
        self, http: httpx.AsyncClient, group: SessionGroup, sessions: Sequence[Session]
    ) -> bool:
        """Send sessions; an unexpected error keeps them here, and does not end the others."""
        is_moved = False
        try:
            with ExitStack() as moving:
                for session in sessions:
                    moving.enter_context(session.moving())
                moving.enter_context(self._sessions.store.offering(group))
                is_moved = await self._offer(http, group, sessions)
        except Exception:
            log.exception("a move of sessions failed")
        self._outcomes.labels("moved" if is_moved else "kept").inc()
        return is_moved

    async def _offer(
        self, http: httpx.AsyncClient, group: SessionGroup, sessions: Sequence[Session]
    ) -> bool:
        """Offer sessions to one replica after the other, or to that of their group."""
        candidates = self._peers.candidates()
        if group.moved_to is not None:
            candidates = [each for each in candidates if each.id == group.moved_to.id]
        elif self._has_large_session(group):
            return False
        if not candidates:
            return False
        body = await self._body(group, sessions)
        if len(body) > self._max_bytes:
            self._keep(group)
            return False
        for replica in candidates:
            if await self._is_accepted(http, replica, group, sessions, body):
                return True
        return False

    def _has_large_session(self, group: SessionGroup) -> bool:
        """True if a session is too large, so that the whole group stays: its stream is one."""
        sessions = self._sessions.store.sessions_of(group)
        is_large = any(estimated_bytes(session) > self._max_bytes for session in sessions)
        if is_large:
            self._keep(group)
        return is_large

    def _keep(self, group: SessionGroup) -> None:
        log.info("the sessions of group %s are too large for a move", group.id)
        if group.moved_to is None:
            self._too_large.add(group)

    async def _body(self, group: SessionGroup, sessions: Sequence[Session]) -> bytes:
        store, now = self._sessions.store, self._sessions.now()
        sent = [session.id for session in sessions]
        moved = moved_group(group, sent, store.last_sequence, now)
        if group.moved_to is None:
            moved = moved.model_copy(update=self._first_fields(group, sent))
        own_id = self._cluster.own_id
        return await asyncio.to_thread(encoded, own_id, group.owner, moved, list(sessions), now)

    def _first_fields(self, group: SessionGroup, sent: Sequence[str]) -> dict[str, object]:
        """Fields of the first request for a group. The sessions that follow are not counted yet."""
        left = [each for each in self._sessions.store.sessions_of(group) if each.id not in sent]
        return {
            "session_ids": group.session_ids,
            "keys": [self._sessions.key_of(session_id) for session_id in group.session_ids],
            "remaining_ids": sorted(each.id for each in left),
            "num_finished": group.num_finished - sum(each.state == "finished" for each in left),
        }

    async def _is_accepted(
        self,
        http: httpx.AsyncClient,
        replica: Replica,
        group: SessionGroup,
        sessions: Sequence[Session],
        body: bytes,
    ) -> bool:
        """True if the other replica has accepted the sessions, which then are there only."""
        is_accepted = False
        try:
            is_accepted = await is_accepted_by(
                http, replica, PATH, body, resource_id=sessions[0].id, seconds=OFFER_SECONDS
            )
            if is_accepted:
                self._on_moved(group, sessions, replica)
        finally:
            if not is_accepted:
                await self._keys.take_back(_registry_keys(group, sessions), replica.id)
        return is_accepted

    def _on_moved(self, group: SessionGroup, sessions: Sequence[Session], replica: Replica) -> None:
        """Redirect requests for the sessions, whose keys the replica has taken over."""
        self._keys.handed_over(_registry_keys(group, sessions))
        self._sessions.store.on_moved(group, sessions, replica)
        for session in sessions:
            self._sessions.kv_releases.add(session.id)
        log.info("%d sessions moved to %s", len(sessions), replica.url)


def _registry_keys(group: SessionGroup, sessions: Sequence[Session]) -> list[str]:
    """Keys that the receiver takes over: those of the group with its first sessions."""
    keys = [move_key(session.id) for session in sessions]
    return keys if group.moved_to is not None else [*keys, *group.registry_keys]
