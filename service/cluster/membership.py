"""This replica among the others: it shows itself, remembers who is there, says where things belong.

Nothing that runs waits for the directory. Where a name belongs is answered from memory; only for a
replica that was never seen is the directory asked. Who has an idempotency key is asked before a
rollout begins, for a bounded time; without an answer it begins here, and its key is shared when the
directory is back.

Who is not listed is gone only if that can be said: a directory that was lost, or has lost what it
held, is believed again after one whole expiry, when everybody who lives has shown himself.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

from service.cluster.claims import Claims
from service.cluster.redirect import RedirectToReplica
from service.cluster.registry import ClusterRegistry, ClusterView, RegistryUnavailable, Replica
from service.cluster.settings import DirectorySettings
from service.http.errors import DirectoryUnavailable, ReplicaGone

FIRST_RETRY_SECONDS = 0.25
RETRY_AFTER_SECONDS = 2.0
STOP_SECONDS = 5.0

log = logging.getLogger(__name__)


class ClusterMembership:
    """Owner of this replica's entry. Lives on one event loop.

    `describe` is asked at every heartbeat; `failed` is told which call got no answer,
    `on_unshared_key` of every rollout whose key could not be asked for.
    """

    def __init__(
        self,
        registry: ClusterRegistry,
        settings: DirectorySettings,
        *,
        describe: Callable[[], Replica],
        failed: Callable[[str], None],
        on_unshared_key: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.own_id = describe().id
        self._settings = settings
        self._describe = describe
        self._failed = failed
        self._on_unshared_key = on_unshared_key
        self._clock = clock
        self.view_listeners: list[Callable[[ClusterView], None]] = []
        self._view = ClusterView(known=False, replicas={}, manifests={}, target=None)
        self._known_replicas: dict[str, Replica] = {}
        self._claims = Claims(claim=self._register_claim, release=self._unregister_claim)
        self._stopped = False
        self._heartbeat_lock = asyncio.Lock()
        self._heartbeat_requested = asyncio.Event()
        self._num_heartbeats_started = 0
        self._num_failures = 0
        self._connected_since: float | None = None
        self._last_contact_at = clock()

    @property
    def view(self) -> ClusterView:
        """The last one there was."""
        return self._view

    @property
    def last_view_number(self) -> int:
        """Of the last look that has begun."""
        return self._num_heartbeats_started

    @property
    def unavailable(self) -> bool:
        return self._connected_since is None

    @property
    def contact_age_seconds(self) -> float:
        """Since the directory was last heard, or since the start."""
        return self._clock() - self._last_contact_at

    @property
    def is_settled(self) -> bool:
        """Whether everybody who lives has had the time to show himself."""
        if self._connected_since is None:
            return False
        alone = self._settings.redis_url is None
        return alone or self._clock() - self._connected_since >= self._settings.expire_seconds

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Does not wait for the directory. Leaving it, the replica is listed no more."""
        heartbeat_task = asyncio.create_task(self._heartbeat_loop())
        try:
            yield
        finally:
            self._stopped = True
            self._heartbeat_requested.set()
            heartbeat_task.cancel()
            # A client of Redis that swallows the cancellation must not keep the server from ending.
            await asyncio.wait([heartbeat_task], timeout=STOP_SECONDS)
            with suppress(RegistryUnavailable), self.count_failures("leave"):
                await self.registry.leave(self.own_id)
            await self.registry.close()

    def request_heartbeat(self) -> None:
        """What this replica says of itself has changed: others are to hear it now."""
        self._heartbeat_requested.set()

    async def refresh(self) -> ClusterView:
        """What there is, not older than this call, and what this replica says of itself is there.
        DirectoryLost."""
        if self._stopped:
            raise RegistryUnavailable("this replica has left")
        num_started_before = self._num_heartbeats_started
        async with self._heartbeat_lock:
            if self._num_heartbeats_started == num_started_before:
                await self._heartbeat()
        if self.unavailable:
            raise RegistryUnavailable()
        return self._view

    async def check_local(self, replica_id: str) -> None:
        """Raises Elsewhere, or why nobody can be named, unless this is the replica."""
        if replica_id == self.own_id:
            return
        if replica_id not in self._known_replicas:
            await self._find_replica(replica_id)
        raise RedirectToReplica(self._known_replicas[replica_id].url)

    async def claim(self, claim_key: str) -> None:
        """The place is this replica's from now on; raises Elsewhere if it is another's."""
        self._claims.add(claim_key)
        try:
            await self._claim(claim_key)
        except BaseException:
            self._claims.discard(claim_key)
            raise

    def release(self, claim_key: str) -> None:
        """The directory hears of it with the next heartbeat. Again changes nothing."""
        self._claims.release(claim_key)

    async def release_now(self, claim_key: str) -> None:
        """As `release`, but told at once if that can be: a request that is refused here may be sent
        elsewhere next. Nobody claims the place here meanwhile. Cancelled, the next heartbeat tells.
        """
        if self._claims.release(claim_key) and not self.unavailable:
            with suppress(RegistryUnavailable):
                await self._claims.sync_release(claim_key)

    @contextmanager
    def count_failures(self, operation: str) -> Iterator[None]:
        """Around every call of the directory."""
        try:
            yield
        except RegistryUnavailable:
            self._failed(operation)
            raise

    async def _claim(self, claim_key: str) -> None:
        if self.unavailable:
            return self._on_unshared_key()
        try:
            holder = await self._register_claim(claim_key)
        except RegistryUnavailable:
            self.request_heartbeat()
            return self._on_unshared_key()
        try:
            await self.check_local(holder)
        except ReplicaGone:
            # It went between the two questions; the next one takes its place over.
            raise DirectoryUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS) from None

    async def _register_claim(self, claim_key: str) -> str:
        with self.count_failures("claim"):
            return await self.registry.claim(
                claim_key,
                self.own_id,
                ttl_seconds=self._settings.claim_seconds,
                allow_takeover=self.is_settled,
            )

    async def _unregister_claim(self, claim_key: str) -> None:
        with self.count_failures("release"):
            await self.registry.release(claim_key, self.own_id)

    async def _find_replica(self, replica_id: str) -> None:
        """Remembered afterwards; raises if it is gone, or might not be."""
        with suppress(RegistryUnavailable):
            await self.refresh()
        if replica_id in self._known_replicas:
            return
        if not self.is_settled:
            raise DirectoryUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS)
        raise ReplicaGone()

    async def _heartbeat_loop(self) -> None:
        while not self._stopped:
            self._heartbeat_requested.clear()
            await self._heartbeat_safely()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._delay_seconds()):
                    await self._heartbeat_requested.wait()

    async def _heartbeat_safely(self) -> None:
        """Whatever is wrong with the directory, the server serves on."""
        try:
            async with self._heartbeat_lock:
                await self._heartbeat()
        except Exception:
            log.exception("a heartbeat failed")
            self._on_unavailable("a fault of ours")

    def _delay_seconds(self) -> float:
        """Back soon after a failure, but not all at once."""
        if not self._num_failures:
            return self._settings.heartbeat_seconds
        max_delay = FIRST_RETRY_SECONDS * 2.0 ** min(self._num_failures, 16)
        return min(max_delay, self._settings.heartbeat_seconds) * random.uniform(0.5, 1.0)

    async def _heartbeat(self) -> None:
        self._num_heartbeats_started += 1
        try:
            with self.count_failures("beat"):
                view = await self.registry.beat(
                    self._describe(), ttl_seconds=self._settings.expire_seconds
                )
            numbered = replace(view, view_number=self._num_heartbeats_started)
            self._on_view(numbered, reconnected=self.unavailable or not view.known)
            if not await self._claims.sync():
                self.request_heartbeat()
        except RegistryUnavailable as unavailable:
            self._on_unavailable(str(unavailable))

    def _on_view(self, view: ClusterView, *, reconnected: bool) -> None:
        now = self._clock()
        if reconnected:
            self._connected_since = now
            self._claims.on_registry_reset()
            log.info("the directory knows us", extra={"replicas": len(view.replicas)})
        self._last_contact_at = now
        self._num_failures = 0
        self._view = view
        # Until it is settled, who is not listed may only not have come back yet.
        kept = {} if self.is_settled else self._known_replicas
        self._known_replicas = {**kept, **view.replicas}
        for listener in self.view_listeners:
            listener(view)

    def _on_unavailable(self, reason: str) -> None:
        if not self._num_failures:
            log.warning("the directory does not answer: %s", reason)
        self._num_failures += 1
        self._connected_since = None
