"""Session manager: creates, finds, ends and expires agent sessions."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from coppice.wire.sessions import (
    AgentApi,
    SessionEndReason,
    SessionFinishRequest,
    SessionsAnswer,
    SessionsRequest,
    SessionState,
)
from service.cluster.idempotency_claim import IdempotencyClaim
from service.cluster.idempotency_keys import IdempotencyKeys
from service.cluster.membership import ClusterMembership
from service.config.sessions import SessionsSettings
from service.errors import (
    DRAINING_RETRY_SECONDS,
    Draining,
    Overloaded,
    QuotaExceeded,
    SessionClosed,
    SessionNotFound,
)
from service.fair_threads import FairThreads
from service.observability.session_metrics import SessionMetrics
from service.rollouts.admission import Admission
from service.rollouts.manager import RolloutManager
from service.rollouts.tokenizer import Tokenizer
from service.sessions.addresses import SessionAddresses
from service.sessions.agent_call import SessionCall
from service.sessions.call_recorder import CallServices
from service.sessions.factory import SessionFactory
from service.sessions.kv_release import KvReleaseQueue, Release
from service.sessions.session import Session
from service.sessions.session_group import SessionGroup
from service.sessions.store import RETRY_SECONDS, SessionStore, StreamItem

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0


class SessionManager:
    """Agent sessions of this replica. Runs on one event loop.

    On exit, the context manager `running` cancels all open sessions. `release_kv` releases the KV
    that the engine retains for sessions.
    """

    def __init__(
        self,
        settings: SessionsSettings,
        rollouts: RolloutManager,
        tokenizer: Tokenizer,
        threads: FairThreads,
        cluster: ClusterMembership,
        keys: IdempotencyKeys,
        metrics: SessionMetrics,
        *,
        admission: Admission,
        advertised_url: str | None,
        keep_seconds: float,
        release_kv: Release,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._rollouts = rollouts
        self._cluster = cluster
        self._metrics = metrics
        self._admission = admission
        self._clock = clock
        self.keys = keys
        self.store = SessionStore(
            keep_seconds=keep_seconds,
            max_bytes=settings.max_bytes,
            on_drop=metrics.dropped.inc,
            release=keys.unregister,
            clock=clock,
        )
        self.addresses = SessionAddresses(self.store, cluster, keys, advertised_url)
        self.kv_releases = KvReleaseQueue(release_kv, track=self._track)
        self.factory = SessionFactory(settings, self.store, cluster.own_id, clock)
        self._tasks: asyncio.TaskGroup | None = None
        self._services = CallServices(
            rollouts=rollouts,
            tokenizer=tokenizer,
            threads=threads,
            metrics=metrics,
            on_call=self._renew,
            on_growth=self._on_growth,
            check_memory=self.store.check_memory,
            track=self._track,
        )

    @property
    def num_open(self) -> int:
        return self.store.num_open

    @property
    def num_bytes(self) -> int:
        return self.store.num_bytes

    def open_sessions(self) -> list[Session]:
        return self.store.open_sessions()

    def now(self) -> float:
        return self._clock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager that ends sessions when they are due, and all of them on exit."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            checks = tasks.create_task(self._check_regularly())
            try:
                yield
            finally:
                await self.close()
                checks.cancel()
                self._tasks = None

    async def create(
        self, request: SessionsRequest, *, owner: str, claim: IdempotencyClaim | None = None
    ) -> SessionsAnswer:
        """Create the sessions of a request, or find those that the same request has created."""
        if claim is None:
            return self._create(request, owner, None)
        known = self.keys.find(claim)
        if known is not None:
            return self._answer(self.store.group(owner, known))
        async with self.keys.claimed(claim):
            return self._create(request, owner, claim)

    def _create(
        self, request: SessionsRequest, owner: str, claim: IdempotencyClaim | None
    ) -> SessionsAnswer:
        self.check_capacity(owner, request.n)
        self._rollouts.factory.check_kept_kv(request.keep_kv, request.weights)
        self.store.check_memory()
        group = self.factory.group(request, owner, claim)
        self.store.add(group, self.factory.sessions(group, request))
        if claim is not None:
            self.keys.bind(claim, group.id)
        return self._answer(group)

    def check_capacity(self, owner: str, num_new: int) -> None:
        self._admission.check_open()
        settings = self._settings
        if self._tasks is None:
            raise Draining(retry_after_seconds=DRAINING_RETRY_SECONDS)
        if self.num_open + num_new > settings.max_open:
            raise Overloaded(
                f"the server may have {settings.max_open} open sessions (sessions.max_open)",
                retry_after_seconds=RETRY_SECONDS,
            )
        limit = settings.max_open_per_key
        if limit is not None and self.store.num_open_of(owner) + num_new > limit:
            raise QuotaExceeded(
                f"the limit per API key is {limit} open sessions",
                retry_after_seconds=RETRY_SECONDS,
            )

    def _answer(self, group: SessionGroup) -> SessionsAnswer:
        return SessionsAnswer(
            group=group.id, sessions=[self.addresses.start(i) for i in group.session_ids]
        )

    def call(self, session_id: str, api: AgentApi) -> SessionCall:
        """A new call of the agent, whose key was checked."""
        return SessionCall(self._of_agent(session_id), api, self._services)

    def owner_of(self, session_id: str) -> str:
        return self._of_agent(session_id).owner

    def _of_agent(self, session_id: str) -> Session:
        session = self.store.find(session_id)
        if session is None:
            self.store.check_here(session_id)
            raise SessionClosed("the session has ended, and is no longer cached")
        return session

    def get(self, session_id: str, *, owner: str) -> Session:
        """Find an open or cached session of `owner`."""
        session = self.store.find(session_id)
        if session is None:
            self.store.check_here(session_id)
        if session is None or session.owner != owner:
            raise SessionNotFound()
        return session

    def stream(self, owner: str, group_id: str | None, after: int) -> AsyncIterator[StreamItem]:
        """Ended sessions of `owner`, or of one of its groups; see `SessionStore.stream`."""
        group = None if group_id is None else self.store.group(owner, group_id)
        return self.store.stream(owner, group, after)

    async def finish(self, session: Session, outcome: SessionFinishRequest) -> None:
        """Finish a session with its rewards; a repetition with the same rewards has no effect."""
        if session.is_open:
            await session.check_leaves(outcome)
        await self._wait_for_move(session)
        if session.is_open:
            session.outcome = outcome
            self._close_session(session, "finished", "finished")
        await session.ended.wait()
        session.check_not_returned()
        if session.state != "finished" or session.outcome != outcome:
            raise SessionClosed(f"the session has ended ({session.end_reason})")

    async def _wait_for_move(self, session: Session) -> None:
        """Wait until a session is not being moved; raises RedirectToReplica if it was moved."""
        await session.wait_for_move()
        session.check_not_returned()
        self.store.check_here(session.id)

    async def cancel(self, session: Session) -> None:
        await self._wait_for_move(session)
        if session.is_open:
            self._close_session(session, "cancelled", "cancelled")
        await session.ended.wait()
        session.check_not_returned()

    def _close_session(
        self, session: Session, state: SessionState, reason: SessionEndReason
    ) -> None:
        """Refuse further calls of a session, and abort the running ones in the background.

        If its group has as many finished sessions as it needs, the others are ended, too.
        """
        session.state, session.end_reason = state, reason
        self._track(self._settle(session, reason))
        if state != "finished":
            return
        group = self.store.group_of(session)
        group.num_finished += 1
        if group.has_finished:
            self._cancel_group(group, "surplus")

    def _cancel_group(self, group: SessionGroup, reason: SessionEndReason) -> None:
        for session in self.store.sessions_of(group):
            if session.is_open and not session.is_moving:
                self._close_session(session, "cancelled", reason)

    async def _settle(self, session: Session, reason: SessionEndReason) -> None:
        """Abort the running calls of a session, and keep its trees.

        After an error of the engine the session ends, too: `finish` and the streams wait for it.
        """
        try:
            await self.abort_calls(session)
        finally:
            self._end(session, reason)

    async def abort_calls(self, session: Session) -> None:
        started = [call.rollout for call in session.calls if call.rollout is not None]
        await asyncio.gather(*map(self._rollouts.cancel, started))
        await session.wait_until_idle()

    def _end(self, session: Session, reason: SessionEndReason) -> None:
        self.kv_releases.add(session.id)
        if session.is_returned:
            return
        self.store.end(session)
        self.on_group_ended(self.store.group_of(session))
        self._metrics.ended.labels(reason).inc()

    def check_due(self) -> None:
        """End sessions whose TTL or deadline has passed, and drop results that were kept."""
        now = self._clock()
        for session in self.store.open_sessions():
            if session.can_move and session.is_open and session.expires_at <= now:
                self._close_session(session, "expired", "expired")
        for group in self.store.groups():
            if group.deadline is not None and group.num_open and group.deadline <= now:
                self._cancel_group(group, "deadline")
            if group.has_finished and group.num_open:
                self._cancel_group(group, "surplus")
            self._check_source(group)
        self.store.drop_expired()

    def _check_source(self, group: SessionGroup) -> None:
        """Do not wait for sessions of a group whose sender has left the cluster."""
        is_gone = self._cluster.is_settled and self._cluster.find(group.source or "") is None
        if group.remaining_ids and is_gone:
            self.store.drop_remaining(group)
            self.on_group_ended(group)

    def on_group_ended(self, group: SessionGroup) -> None:
        if group.claim is not None and not group.num_open and group.moved_to is None:
            self.keys.ended(group.claim)

    async def wait_until_ended(self) -> None:
        """Wait until no session is open, and those of moved groups were sent."""
        await self.store.wait_until_ended()

    async def close(self) -> None:
        """Cancel all open sessions. Their trees so far are streamed, and the streams end."""
        for session in self.store.open_sessions():
            if session.is_open:
                self._close_session(session, "cancelled", "drain")
        for session in self.store.open_sessions():
            await session.ended.wait()
        self.store.close()

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.check_due()

    def _track(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the manager's task group, which outlives all sessions."""
        assert self._tasks is not None, "calls and sessions exist inside running()"
        self._tasks.create_task(_logged(work))

    def _on_growth(self, session: Session) -> None:
        self.store.measure(session)
        if session.is_exhausted and not session.calls:
            self.kv_releases.add(session.id)

    def _renew(self, session: Session) -> None:
        session.expires_at = self._clock() + session.options.ttl_seconds


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine; an error ends only it. Messages of errors may have prompts: not logged."""
    try:
        await work
    except Exception as error:
        log.error("work of a session failed: %s", type(error).__name__)
