"""Construction of agent sessions and session groups from a create request."""

from collections.abc import Callable

from coppice.wire.sessions import CacheScope, SessionsFinish, SessionsRequest
from service.cluster.idempotency_claim import IdempotencyClaim
from service.cluster.registry import new_rollout_id
from service.config.sessions import SessionsSettings
from service.errors import InvalidRequest
from service.rollouts.trees.token_tree import TokenTree
from service.sessions.session import Session
from service.sessions.session_group import SessionGroup
from service.sessions.store import SessionStore


class SessionFactory:
    """Makes the group of a request and its sessions; the caller adds them to the store."""

    def __init__(
        self,
        settings: SessionsSettings,
        store: SessionStore,
        replica: str,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._store = store
        self._replica = replica
        self._clock = clock

    def group(
        self, request: SessionsRequest, owner: str, claim: IdempotencyClaim | None
    ) -> SessionGroup:
        """New group of a request. Raises InvalidRequest for a label that is in use."""
        group_id = f"{self._replica}.{request.group}"
        if request.group is None:
            group_id = new_rollout_id(self._replica)
        if self._store.find_group(owner, group_id) is not None:
            raise InvalidRequest.of_parameter("group", "a group of this label has sessions")
        finish = request.finish or SessionsFinish()
        if (finish.num_sessions or 1) > request.n:
            raise InvalidRequest.of_parameter("finish.num_sessions", "must not exceed n")
        seconds = finish.deadline_seconds
        return SessionGroup(
            id=group_id,
            owner=owner,
            options=request,
            session_ids=[new_rollout_id(self._replica) for _ in range(request.n)],
            finish=finish,
            deadline=None if seconds is None else self._clock() + seconds,
            claim=claim,
            num_open=request.n,
            num_kept=request.n,
        )

    def session(self, group: SessionGroup, session_id: str) -> Session:
        """Session of a group of another replica."""
        index = group.session_ids.index(session_id)
        return self._session(index, group, group.options, _option_bytes(group.options))

    def sessions(self, group: SessionGroup, request: SessionsRequest) -> list[Session]:
        """New sessions of a group, which share the memory of their options."""
        num_bytes = _option_bytes(request)
        return [self._session(index, group, request, num_bytes) for index in range(request.n)]

    def _session(
        self, index: int, group: SessionGroup, request: SessionsRequest, num_option_bytes: int
    ) -> Session:
        max_tokens = self._settings.max_tokens
        session_id = group.session_ids[index]
        return Session(
            id=session_id,
            owner=group.owner,
            group_id=group.id,
            options=request,
            cache_salt=_cache_salt(request.cache_scope, session_id, group),
            expires_at=self._clock() + request.ttl_seconds,
            max_tokens=min(request.max_tokens_total or max_tokens, max_tokens),
            max_calls=self._settings.max_running_calls,
            num_option_bytes=num_option_bytes,
            tree=TokenTree(str(index)),
        )


def _option_bytes(request: SessionsRequest) -> int:
    return len(request.model_dump_json(exclude_unset=True)) // request.n


def _cache_salt(scope: CacheScope, session_id: str, group: SessionGroup) -> str:
    """Salt of a session's prefixes; the id of a group may be reused, those of sessions are not."""
    return session_id if scope == "session" else group.session_ids[0]
