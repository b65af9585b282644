"""Cluster membership of this replica: heartbeats and the cached view of the cluster.

Running rollouts never wait for the registry. The owner of an id is found in the cached view; the
registry is queried only for a replica that was never seen.

A replica missing from the view is gone only if the view is settled, i.e. if every live replica has
had time to send a heartbeat: one full expiry time after an outage or a reset of the registry.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

from service.cluster.registry import (
    ClusterRegistry,
    ClusterView,
    RegistryUnavailable,
    Replica,
)
from service.config.cluster import ClusterSettings
from service.errors import ClusterUnavailable, InvalidRequest, RedirectToReplica, ReplicaGone
from service.observability.metrics import ClusterMetrics

FIRST_RETRY_SECONDS = 0.25
FAST_HEARTBEAT_SECONDS = 0.5
FAST_HEARTBEATS_FOR_SECONDS = 60.0
RETRY_AFTER_SECONDS = 2.0
STOP_SECONDS = 5.0

log = logging.getLogger(__name__)


class ClusterMembership:
    """Registers this replica by heartbeats, and finds other replicas.

    Runs on one event loop. `describe` returns the registry entry for each heartbeat. With
    `is_standalone` no other replica uses the registry, so that nothing needs to be replicated.
    `sync_keys` is called after each heartbeat, with True if the registry may have lost all keys; it
    returns False if some are left to send with the next one. `on_view` receives each new view.
    """

    def __init__(
        self,
        registry: ClusterRegistry,
        settings: ClusterSettings,
        metrics: ClusterMetrics,
        *,
        describe: Callable[[], Replica],
        is_standalone: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.own_id = describe().id
        self.is_standalone = is_standalone
        self._settings = settings
        self._describe = describe
        self._metrics = metrics
        self._clock = clock
        self.on_view: Callable[[ClusterView], None] | None = None
        self._view = ClusterView(known=False, replicas={}, manifests={}, target=None)
        self._known_replicas: dict[str, Replica] = {}
        self.sync_keys: Callable[[bool], Awaitable[bool]] | None = None
        self._stopped = False
        self._heartbeat_lock = asyncio.Lock()
        self._heartbeat_requested = asyncio.Event()
        self._num_heartbeats_started = 0
        self._num_failures = 0
        self._fast_until = -float("inf")
        self._connected_since: float | None = None
        self._last_contact_at = clock()

    @property
    def view(self) -> ClusterView:
        """Most recent view of the cluster; may be stale while the registry is unavailable."""
        return self._view

    @property
    def last_view_number(self) -> int:
        """Number of the latest heartbeat that was started, as in `ClusterView.view_number`."""
        return self._num_heartbeats_started

    @property
    def unavailable(self) -> bool:
        return self._connected_since is None

    @property
    def contact_age_seconds(self) -> float:
        """Seconds since the last successful heartbeat, or since the start if there was none."""
        return self._clock() - self._last_contact_at

    @property
    def is_settled(self) -> bool:
        """True once every live replica has had time to send a heartbeat to the registry."""
        if self._connected_since is None:
            return False
        alone = self._settings.redis_url is None
        return alone or self._clock() - self._connected_since >= self._settings.expire_seconds

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager that sends heartbeats; removes this replica from the registry on exit.

        Does not wait for the first heartbeat.
        """
        heartbeat_task = asyncio.create_task(self._heartbeat_loop())
        try:
            yield
        finally:
            self._stopped = True
            self._heartbeat_requested.set()
            heartbeat_task.cancel()
            # A Redis client that swallows the cancellation must not block the shutdown.
            await asyncio.wait([heartbeat_task], timeout=STOP_SECONDS)
            with suppress(RegistryUnavailable), self.count_failures("leave"):
                await self.registry.leave(self.own_id)
            await self.registry.close()

    def request_heartbeat(self) -> None:
        """Send a heartbeat now, because the registry entry of this replica has changed."""
        self._heartbeat_requested.set()

    def start_fast_heartbeats(self) -> None:
        """Send heartbeats more often for a while, because the activation target may change soon."""
        self._fast_until = self._clock() + FAST_HEARTBEATS_FOR_SECONDS
        self.request_heartbeat()

    def stop_fast_heartbeats(self) -> None:
        self._fast_until = -float("inf")
        self.request_heartbeat()

    async def refresh(self) -> ClusterView:
        """Send a heartbeat and return the cluster view, in which this replica is up to date.

        Concurrent calls share a heartbeat. Raises RegistryUnavailable.
        """
        if self._stopped:
            raise RegistryUnavailable("this replica has left the cluster")
        num_started_before = self._num_heartbeats_started
        async with self._heartbeat_lock:
            if self._num_heartbeats_started == num_started_before:
                await self._heartbeat()
        if self.unavailable:
            raise RegistryUnavailable()
        return self._view

    async def check_local(self, replica_id: str) -> None:
        """Raise an exception unless `replica_id` is the id of this replica.

        Raises RedirectToReplica for a known replica, otherwise ReplicaGone or ClusterUnavailable.
        """
        if replica_id == self.own_id:
            return
        if replica_id not in self._known_replicas:
            await self._find_replica(replica_id)
        raise RedirectToReplica(self._known_replicas[replica_id].url)

    def find(self, replica_id: str) -> Replica | None:
        """A replica of the latest views; None if it is not known."""
        return self._known_replicas.get(replica_id)

    async def check_source(self, replica_id: str) -> None:
        """Refuse work that no other replica of the cluster has sent."""
        if not self.is_standalone and self.find(replica_id) is None:
            with suppress(RegistryUnavailable):
                await self.refresh()
        if replica_id == self.own_id or self.find(replica_id) is None:
            raise InvalidRequest.of_parameter("source", "is no other replica of this cluster")

    @contextmanager
    def count_failures(self, operation: str) -> Iterator[None]:
        """Context manager around a call to the cluster registry; counts a failure of the call."""
        try:
            yield
        except RegistryUnavailable:
            self._metrics.failures.labels(operation).inc()
            raise

    async def _find_replica(self, replica_id: str) -> None:
        """Find a replica by refreshing the cluster view; raises ReplicaGone if it is not there.

        Raises ClusterUnavailable instead if the view is not settled.
        """
        with suppress(RegistryUnavailable):
            await self.refresh()
        if replica_id in self._known_replicas:
            return
        if not self.is_settled:
            raise ClusterUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS)
        raise ReplicaGone()

    async def _heartbeat_loop(self) -> None:
        while not self._stopped:
            self._heartbeat_requested.clear()
            await self._heartbeat_safely()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._delay_seconds()):
                    await self._heartbeat_requested.wait()

    async def _heartbeat_safely(self) -> None:
        """Send a heartbeat. Exceptions are logged, so the server continues without a registry."""
        try:
            async with self._heartbeat_lock:
                await self._heartbeat()
        except Exception:
            log.exception("a heartbeat failed")
            self._on_unavailable("internal error")

    def _delay_seconds(self) -> float:
        """Seconds to wait before the next heartbeat, with exponential backoff after failures."""
        delay = self._settings.heartbeat_seconds
        if self._clock() < self._fast_until:
            delay = min(delay, FAST_HEARTBEAT_SECONDS)
        if self._num_failures:
            backoff = FIRST_RETRY_SECONDS * 2.0 ** min(self._num_failures, 16)
            delay = min(backoff, delay) * random.uniform(0.5, 1.0)
        return delay

    async def _heartbeat(self) -> None:
        self._num_heartbeats_started += 1
        try:
            with self.count_failures("heartbeat"):
                view = await self.registry.beat(
                    self._describe(), ttl_seconds=self._settings.expire_seconds
                )
            numbered = replace(view, view_number=self._num_heartbeats_started)
            is_reset = self.unavailable or not view.known
            self._on_view(numbered, reconnected=is_reset)
            if self.sync_keys is not None and not await self.sync_keys(is_reset):
                self.request_heartbeat()
        except RegistryUnavailable as unavailable:
            self._on_unavailable(str(unavailable))

    def _on_view(self, view: ClusterView, *, reconnected: bool) -> None:
        now = self._clock()
        if reconnected:
            self._connected_since = now
            log.info("registered with the cluster", extra={"replicas": len(view.replicas)})
        self._last_contact_at = now
        self._num_failures = 0
        self._view = view
        # Until the view is settled, a live replica may not have registered again.
        kept = {} if self.is_settled else self._known_replicas
        self._known_replicas = {**kept, **view.replicas}
        if self.on_view is not None:
            self.on_view(view)

    def _on_unavailable(self, reason: str) -> None:
        if not self._num_failures:
            log.warning("the cluster registry does not respond: %s", reason)
        self._num_failures += 1
        self._connected_since = None
