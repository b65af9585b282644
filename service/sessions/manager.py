"""Session manager: creates, finds, ends and expires agent sessions, and keeps ended ones."""

import asyncio
import base64
import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from coppice.wire.sessions import (
    AgentApi,
    SessionEndReason,
    SessionFinishRequest,
    SessionsAnswer,
    SessionsEndRecord,
    SessionsFinish,
    SessionsProgressRecord,
    SessionsRequest,
    SessionStart,
    SessionState,
)
from service.cluster.membership import ClusterMembership
from service.cluster.registry import new_rollout_id
from service.http.errors import (
    Draining,
    InvalidRequest,
    Overloaded,
    QuotaExceeded,
    ServiceError,
    SessionClosed,
    SessionNotFound,
)
from service.observability.session_metrics import SessionMetrics
from service.rollouts.admission import DRAINING_RETRY_SECONDS, Admission
from service.rollouts.idempotency import IdempotencyClaim, IdempotencyKeys
from service.rollouts.manager import RolloutManager
from service.rollouts.tokenizer import Tokenizer
from service.sessions.call import CallServices, SessionCall
from service.sessions.session import Session
from service.sessions.settings import SessionsSettings
from service.sessions.tree import SessionTree

KEY_PREFIX = "coppice_session_"
CHECK_SECONDS = 1.0
PROGRESS_SECONDS = 15.0
RETRY_SECONDS = 2.0

StreamItem = Session | SessionsProgressRecord | SessionsEndRecord


@dataclass(slots=True, kw_only=True, eq=False)
class SessionGroup:
    """The sessions of one request. `num_kept` counts those that are open or cached."""

    id: str
    owner: str
    session_ids: list[str]
    finish: SessionsFinish
    deadline: float | None
    claim: IdempotencyClaim | None
    num_open: int
    num_kept: int
    num_finished: int = 0


class SessionManager:
    """Agent sessions of this replica. Runs on one event loop.

    Ended sessions are kept for `keep_seconds`, and fewer if all sessions need more memory than
    `sessions.max_bytes`. The key of a session is derived from its id and a secret of this process,
    so it is stored nowhere.
    """

    def __init__(
        self,
        settings: SessionsSettings,
        rollouts: RolloutManager,
        tokenizer: Tokenizer,
        cluster: ClusterMembership,
        metrics: SessionMetrics,
        *,
        admission: Admission,
        advertised_url: str | None,
        keep_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._rollouts = rollouts
        self._cluster = cluster
        self._metrics = metrics
        self._admission = admission
        self._base_url = advertised_url
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, tuple[float, Session]] = OrderedDict()
        self._groups: dict[tuple[str, str], SessionGroup] = {}
        self._sizes: dict[str, int] = {}
        self._num_bytes = 0
        self._last_sequence = 0
        self._keys = IdempotencyKeys(
            max_seconds=keep_seconds, on_released=cluster.release, clock=clock
        )
        self._changed = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._is_closed = False
        self._services = CallServices(
            rollouts=rollouts,
            tokenizer=tokenizer,
            metrics=metrics,
            on_call=self._renew,
            on_growth=self._measure,
            check_memory=self._check_memory,
            track=self._track,
        )

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

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
        known = self._keys.claim(claim)
        if known is not None:
            group = self._groups.get((owner, known))
            if group is None:
                raise SessionNotFound("the sessions of this request are no longer cached")
            return self._answer(group)
        try:
            await self._cluster.claim(claim.cluster_key)
            try:
                return self._create(request, owner, claim)
            except ServiceError:
                await self._cluster.release_now(claim.cluster_key)
                raise
        except BaseException:
            self._keys.release(claim)
            raise

    def _create(
        self, request: SessionsRequest, owner: str, claim: IdempotencyClaim | None
    ) -> SessionsAnswer:
        self._admission.check_open()
        self._check_capacity(owner, request.n)
        group = self._new_group(request, owner, claim)
        for index, session_id in enumerate(group.session_ids):
            self._open[session_id] = session = self._new_session(session_id, index, group, request)
            self._measure(session)
        self._groups[owner, group.id] = group
        if claim is not None:
            self._keys.bind(claim, group.id)
        return self._answer(group)

    def _check_capacity(self, owner: str, num_new: int) -> None:
        settings = self._settings
        if len(self._open) + num_new > settings.max_open:
            raise Overloaded(
                f"the server may have {settings.max_open} open sessions (sessions.max_open)",
                retry_after_seconds=RETRY_SECONDS,
            )
        if settings.max_open_per_key is None:
            return
        num_owned = sum(session.owner == owner for session in self._open.values())
        if num_owned + num_new > settings.max_open_per_key:
            raise QuotaExceeded(
                f"the limit per API key is {settings.max_open_per_key} open sessions",
                retry_after_seconds=RETRY_SECONDS,
            )

    def _new_group(
        self, request: SessionsRequest, owner: str, claim: IdempotencyClaim | None
    ) -> SessionGroup:
        replica = self._cluster.own_id
        group_id = f"{replica}.{request.group}" if request.group else new_rollout_id(replica)
        if (owner, group_id) in self._groups:
            raise InvalidRequest.of_parameter("group", "a group of this label has sessions")
        finish = request.finish or SessionsFinish()
        if (finish.num_sessions or 1) > request.n:
            raise InvalidRequest.of_parameter("finish.num_sessions", "must not exceed n")
        seconds = finish.deadline_seconds
        return SessionGroup(
            id=group_id,
            owner=owner,
            session_ids=[new_rollout_id(replica) for _ in range(request.n)],
            finish=finish,
            deadline=None if seconds is None else self._clock() + seconds,
            claim=claim,
            num_open=request.n,
            num_kept=request.n,
        )

    def _new_session(
        self, session_id: str, index: int, group: SessionGroup, request: SessionsRequest
    ) -> Session:
        max_tokens = self._settings.max_tokens
        return Session(
            id=session_id,
            owner=group.owner,
            group_id=group.id,
            options=request,
            expires_at=self._clock() + request.ttl_seconds,
            max_tokens=min(request.max_tokens_total or max_tokens, max_tokens),
            max_calls=self._settings.max_running_calls,
            tree=SessionTree(str(index)),
        )

    def _answer(self, group: SessionGroup) -> SessionsAnswer:
        return SessionsAnswer(group=group.id, sessions=[self._start(i) for i in group.session_ids])

    def _start(self, session_id: str) -> SessionStart:
        path = f"/sessions/{session_id}"
        base_url = None if self._base_url is None else self._base_url.rstrip("/") + path
        return SessionStart(
            id=session_id, key=self._key_of(session_id), path=path, base_url=base_url
        )

    def _key_of(self, session_id: str) -> str:
        digest = hmac.digest(self._secret, session_id.encode(), hashlib.sha256)
        return KEY_PREFIX + base64.urlsafe_b64encode(digest).decode().rstrip("=")

    def has_key(self, session_id: str, key: str) -> bool:
        """True if the key is that of the session, which may have ended."""
        return hmac.compare_digest(self._key_of(session_id).encode(), key.encode())

    def call(self, session_id: str, api: AgentApi) -> SessionCall:
        """A new call of the agent, which has the session's key."""
        return SessionCall(self._of_agent(session_id), api, self._services)

    def owner_of(self, session_id: str) -> str:
        return self._of_agent(session_id).owner

    def _of_agent(self, session_id: str) -> Session:
        session = self._find(session_id)
        if session is None:
            raise SessionClosed("the session has ended, and is no longer cached")
        return session

    def get(self, session_id: str, *, owner: str) -> Session:
        """Find an open or cached session of `owner`."""
        session = self._find(session_id)
        if session is None or session.owner != owner:
            raise SessionNotFound()
        return session

    def _find(self, session_id: str) -> Session | None:
        ended = self._ended.get(session_id)
        return self._open.get(session_id) if ended is None else ended[1]

    def now(self) -> float:
        return self._clock()

    async def finish(self, session: Session, outcome: SessionFinishRequest) -> None:
        """Finish a session with its rewards; a repetition with the same rewards has no effect."""
        if session.is_open:
            await self._check_leaves(session, outcome)
        if session.is_open:
            session.outcome = outcome
            await self._end_in_background(session, "finished", "finished")
        await session.ended.wait()
        if session.state != "finished" or session.outcome != outcome:
            raise SessionClosed(f"the session has ended ({session.end_reason})")

    async def _check_leaves(self, session: Session, outcome: SessionFinishRequest) -> None:
        """Refuse rewards of segments that are not leaves of the session's trees."""
        if not outcome.rewards:
            return
        answer = await session.answer()
        leaves = {leaf for group in answer.groups for leaf in group.leaves or ()}
        if unknown := sorted(outcome.rewards.keys() - leaves):
            raise InvalidRequest.of_parameter("rewards", f"{unknown[0][:64]} is not a leaf")

    async def cancel(self, session: Session) -> None:
        if session.is_open:
            await self._end_in_background(session, "cancelled", "cancelled")
        await session.ended.wait()

    async def _end_in_background(
        self, session: Session, state: SessionState, reason: SessionEndReason
    ) -> None:
        """End a session even if the caller disconnects meanwhile."""
        if self._tasks is None:
            raise Draining(retry_after_seconds=DRAINING_RETRY_SECONDS)
        self._set_ended(session, state, reason)
        await asyncio.shield(self._tasks.create_task(self._settle(session)))

    def _set_ended(self, session: Session, state: SessionState, reason: SessionEndReason) -> None:
        """Refuse further calls; there is no await before the group's other sessions are ended."""
        session.state, session.end_reason = state, reason
        group = self._groups[session.owner, session.group_id]
        group.num_finished += state == "finished"
        if state == "finished" and group.num_finished == group.finish.num_sessions:
            self._end_group(group, "surplus")

    def _end_group(self, group: SessionGroup, reason: SessionEndReason) -> None:
        for session_id in group.session_ids:
            session = self._open.get(session_id)
            if session is not None and session.is_open:
                self._set_ended(session, "cancelled", reason)
                self._track(self._settle(session))

    async def _settle(self, session: Session) -> None:
        """Abort the running calls of a session, and keep its trees."""
        for call in list(session.calls):
            if call.rollout is not None:
                await self._rollouts.cancel(call.rollout)
        await session.wait_until_idle()
        self._last_sequence += 1
        session.sequence = self._last_sequence
        del self._open[session.id]
        self._ended[session.id] = (self._clock(), session)
        group = self._groups[session.owner, session.group_id]
        group.num_open -= 1
        if not group.num_open and group.claim is not None:
            self._keys.ended(group.claim)
        assert session.end_reason is not None, "the session has ended"
        self._metrics.ended.labels(session.end_reason).inc()
        session.ended.set()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def stream(
        self, owner: str, group_id: str | None, after: int
    ) -> AsyncIterator[StreamItem]:
        """Ended sessions of `owner` in the order of their sequence; progress while none ends.

        The stream of a group ends with it. Others end when the server stops.
        """
        group = None if group_id is None else self._group(owner, group_id)
        while True:
            changed = self._changed
            for session in self._ended_after(owner, group, after):
                yield session
                assert session.sequence is not None, "the session has ended"
                after = session.sequence
            if changed.is_set():
                continue
            if group is not None and not group.num_open:
                yield self._end_record(group)
                return
            if self._is_closed:
                return
            try:
                async with asyncio.timeout(PROGRESS_SECONDS):
                    await changed.wait()
            except TimeoutError:
                yield SessionsProgressRecord(num_open=self._num_open(owner, group))

    def _group(self, owner: str, group_id: str) -> SessionGroup:
        group = self._groups.get((owner, group_id))
        if group is None:
            raise SessionNotFound("no group of this id has open or cached sessions")
        return group

    def _ended_after(self, owner: str, group: SessionGroup | None, after: int) -> list[Session]:
        return [
            session
            for _, session in self._ended.values()
            if session.owner == owner
            and (group is None or session.group_id == group.id)
            and (session.sequence or 0) > after
        ]

    def _num_open(self, owner: str, group: SessionGroup | None) -> int:
        if group is not None:
            return group.num_open
        return sum(session.owner == owner for session in self._open.values())

    def _end_record(self, group: SessionGroup) -> SessionsEndRecord:
        return SessionsEndRecord(
            num_sessions=len(group.session_ids),
            num_finished=group.num_finished,
            num_dropped=len(group.session_ids) - group.num_kept,
        )

    def check_due(self) -> None:
        """End sessions whose TTL or deadline has passed, and drop results that were kept."""
        now = self._clock()
        for session in list(self._open.values()):
            if session.is_open and not session.calls and session.expires_at <= now:
                self._set_ended(session, "expired", "expired")
                self._track(self._settle(session))
        for group in list(self._groups.values()):
            if group.deadline is not None and group.num_open and group.deadline <= now:
                self._end_group(group, "deadline")
        while self._ended:
            ended_at, session = next(iter(self._ended.values()))
            if ended_at + self._keep_seconds > now:
                break
            self._drop(session)

    async def wait_until_ended(self) -> None:
        """Wait until no session is open."""
        while self._open:
            await self._changed.wait()

    async def close(self) -> None:
        """Cancel all open sessions; their trees so far are streamed, and the streams end."""
        for session in list(self._open.values()):
            if session.is_open:
                self._set_ended(session, "cancelled", "drain")
                self._track(self._settle(session))
        await self.wait_until_ended()
        self._is_closed = True
        self._notify()

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.check_due()

    def _track(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the manager's task group, which outlives all sessions."""
        assert self._tasks is not None, "calls and sessions exist inside running()"
        self._tasks.create_task(work)

    def _renew(self, session: Session) -> None:
        session.expires_at = self._clock() + session.options.ttl_seconds

    def _check_memory(self) -> None:
        """Refuse a call if the open sessions alone take all memory."""
        if self._num_bytes > self._settings.max_bytes:
            raise Overloaded(
                "the sessions take all memory that they may have (sessions.max_bytes)",
                retry_after_seconds=RETRY_SECONDS,
            )

    def _measure(self, session: Session) -> None:
        """Update the memory of all sessions, and drop the oldest ended ones above the limit."""
        size = session.num_bytes
        self._num_bytes += size - self._sizes.get(session.id, 0)
        self._sizes[session.id] = size
        while self._num_bytes > self._settings.max_bytes and self._ended:
            _, oldest = next(iter(self._ended.values()))
            self._metrics.dropped.inc()
            self._drop(oldest)

    def _drop(self, session: Session) -> None:
        del self._ended[session.id]
        self._num_bytes -= self._sizes.pop(session.id)
        group = self._groups[session.owner, session.group_id]
        group.num_kept -= 1
        if not group.num_kept:
            del self._groups[session.owner, session.group_id]
