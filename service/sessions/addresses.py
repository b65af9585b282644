"""Session keys and URLs for agents, and look-up of the replica that has a session."""

import asyncio
import base64
import hashlib
import hmac
import secrets

from coppice.wire.sessions import SessionStart
from service.cluster.idempotency_claim import move_key
from service.cluster.idempotency_keys import IdempotencyKeys
from service.cluster.membership import RETRY_AFTER_SECONDS, ClusterMembership
from service.cluster.registry import replica_id_of
from service.errors import ClusterUnavailable
from service.sessions.store import SessionStore

KEY_PREFIX = "coppice_session_"
MAX_LOOKUPS = 16
"""Maximum number of concurrent look-ups of sessions in the cluster registry."""


class SessionKeys:
    """Keys of sessions, derived from their ids and a secret of this process.

    So they are stored nowhere.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def key_of(self, session_id: str) -> str:
        digest = hmac.digest(self._secret, session_id.encode(), hashlib.sha256)
        return KEY_PREFIX + base64.urlsafe_b64encode(digest).decode().rstrip("=")


class SessionAddresses:
    """Keys, paths and replicas of sessions, also of those that another replica has."""

    def __init__(
        self,
        store: SessionStore,
        cluster: ClusterMembership,
        registered: IdempotencyKeys,
        base_url: str | None,
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._registered = registered
        self._base_url = base_url
        self._keys = SessionKeys()
        self._lookups = asyncio.Semaphore(MAX_LOOKUPS)

    def start(self, session_id: str) -> SessionStart:
        path = f"/sessions/{session_id}"
        base_url = None if self._base_url is None else self._base_url.rstrip("/") + path
        key = self.key_of(session_id)
        return SessionStart(id=session_id, key=key, path=path, base_url=base_url)

    def key_of(self, session_id: str) -> str:
        return self._store.key_of(session_id) or self._keys.key_of(session_id)

    def has_key(self, session_id: str, key: str) -> bool:
        """True if the key is that of the session, which may have ended."""
        return hmac.compare_digest(self.key_of(session_id).encode(), key.encode())

    async def check_local(self, session_id: str) -> None:
        """Redirect to the replica that has a session, if it is another one.

        Agents are not authenticated yet: few look-ups in the registry run at the same time. Raises
        ClusterUnavailable if a replica may have it that is not known here yet, as after a start, or
        if it is just arriving here: its key is taken over before.
        """
        replica_id = replica_id_of(session_id)
        if replica_id is None or self._store.find(session_id) is not None:
            return
        async with self._lookups:
            if replica_id == self._cluster.own_id or self._cluster.find(replica_id) is not None:
                await self._registered.check_local(session_id, move_key(session_id))
            else:
                holder = await self._registered.check_holder(move_key(session_id))
                if holder == self._cluster.own_id or not self._cluster.is_settled:
                    raise ClusterUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS)

    async def check_group_local(self, group_id: str, *, owner: str) -> None:
        """Redirect to the replica that has a group, if it is another one."""
        if self._store.find_group(owner, group_id) is None:
            await self._registered.check_local(group_id, move_key(group_id, owner))
