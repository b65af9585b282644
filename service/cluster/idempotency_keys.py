"""Table of idempotency keys: a retried request gets the rollout of its first attempt.

Follows draft-ietf-httpapi-idempotency-key-header. A key is scoped to its owner, an API key. It is
claimed before a request is processed, here and in the cluster registry, and bound once its rollout
or group of sessions exists; if the request is rejected, it is released. A key outlives its resource
by a fixed time, even if the result has been evicted earlier: a late retry then gets an error that
the resource is gone, and never creates a second one.

The registry also has a key for each resource that was moved, by which every replica finds it. A
registry key is the name of either kind in the registry. The running resources never wait for the
registry: if it does not respond, a request is served here, and its key is registered later.
"""

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from service.cluster.idempotency_claim import IdempotencyClaim
from service.cluster.membership import RETRY_AFTER_SECONDS, ClusterMembership
from service.cluster.registry import CLAIM_SECONDS, RegistryUnavailable, replica_id_of
from service.errors import (
    ClusterUnavailable,
    IdempotencyInProgress,
    IdempotencyMismatch,
    RedirectToReplica,
    ReplicaGone,
    ServiceError,
)
from service.observability.metrics import ClusterMetrics

MAX_KEYS_PER_HEARTBEAT = 2000


@dataclass(slots=True)
class _Entry:
    claim: IdempotencyClaim
    resource_id: str | None = None
    has_ended: bool = False


class IdempotencyKeys:
    """Idempotency keys of this replica, each with the id of its resource, and their registration.

    A claim is followed by one `release`, or by one `bind` and one `ended`. `held` are the registry
    keys that name this replica. What the registry does not know yet is sent with the heartbeats; a
    key can be claimed or released again while its previous state is being sent.
    """

    def __init__(
        self,
        cluster: ClusterMembership,
        metrics: ClusterMetrics,
        *,
        max_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._max_seconds = max_seconds
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._ended: deque[tuple[float, IdempotencyClaim]] = deque()
        self.held: set[str] = set()
        self._unsent_releases: set[str] = set()
        self._unsent_claims: set[str] = set()
        cluster.sync_keys = self._sync

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, claim: IdempotencyClaim) -> str | None:
        """Id of the resource that the same request has created; None if the key is not claimed.

        Raises IdempotencyMismatch if the first request had another body, and IdempotencyInProgress
        if its resource does not exist yet.
        """
        self._drop_expired()
        existing = self._entries.get(claim.registry_key)
        if existing is None:
            return None
        if existing.claim.fingerprint != claim.fingerprint:
            raise IdempotencyMismatch()
        if existing.resource_id is None:
            raise IdempotencyInProgress(retry_after_seconds=1)
        return existing.resource_id

    def claim(self, claim: IdempotencyClaim) -> str | None:
        """Claim a key on this replica alone, unless `find` finds its resource; returns its id."""
        found = self.find(claim)
        if found is None:
            self._entries[claim.registry_key] = _Entry(claim)
        return found

    @asynccontextmanager
    async def claimed(self, claim: IdempotencyClaim) -> AsyncIterator[None]:
        """Context manager in which the resource of a new claim is created; an error releases it.

        Raises RedirectToReplica if another replica holds the key. The key is released in the
        registry before a ServiceError is sent: a replica that receives the retry must not find it
        held by this one.
        """
        existing = self.claim(claim)
        assert existing is None, "the request was looked up before"
        try:
            await self._hold(claim.registry_key)
            try:
                yield
            except ServiceError:
                await self._release_now(claim.registry_key)
                raise
        except BaseException:
            self.release(claim)
            raise

    def bind(self, claim: IdempotencyClaim, resource_id: str) -> None:
        self._entries[claim.registry_key].resource_id = resource_id

    def release(self, claim: IdempotencyClaim) -> None:
        """Release a key, unless another claim has it since."""
        if self._has(claim):
            del self._entries[claim.registry_key]
            self.unregister(claim.registry_key)

    def ended(self, claim: IdempotencyClaim) -> None:
        """Release a key later, because its resource has ended."""
        self._ended.append((self._clock() + self._max_seconds, claim))
        if self._has(claim):
            self._entries[claim.registry_key].has_ended = True

    def forget_ended(self, claim: IdempotencyClaim, resource_id: str) -> None:
        """Forget the key of a resource that was moved away and returns; it can be claimed again.

        It is not released in the cluster registry, where another replica holds it.
        """
        entry = self._entries.get(claim.registry_key)
        if entry is not None and entry.has_ended and entry.resource_id == resource_id:
            del self._entries[claim.registry_key]

    def unregister(self, registry_key: str) -> None:
        """Release a registry key; the release is sent with the next heartbeat. Idempotent."""
        if registry_key in self.held:
            self.held.remove(registry_key)
            self._unsent_releases.add(registry_key)

    async def take_over(self, registry_key: str, source: str) -> None:
        """Take over a key from the replica `source`, which sends its resource.

        Raises ClusterUnavailable if the registry does not respond, as other replicas could not find
        the new holder, or if a third replica holds the key.
        """
        if not await self.try_to_take_over(registry_key, source):
            raise ClusterUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS)

    async def try_to_take_over(self, registry_key: str, source: str) -> bool:
        """Take over a key; False if a third replica holds it, which is registered.

        One that is not was the holder before the registry lost the transfer to `source`. Raises
        ClusterUnavailable while it is unknown whether that replica has left.
        """
        self.held.add(registry_key)
        is_taken = False
        try:
            holder = await self._register(registry_key, source)
            is_taken = holder == self._cluster.own_id
            if not is_taken and holder not in self._cluster.view.replicas:
                raise RegistryUnavailable("the holder may have left")
        except RegistryUnavailable:
            raise ClusterUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS) from None
        finally:
            if not is_taken:  # the registry may have changed the holder all the same
                self.unregister(registry_key)
        return is_taken

    async def take_from(self, registry_key: str, replica_id: str) -> None:
        """Transfer a key from another replica, because its resource is here."""
        with suppress(RegistryUnavailable):
            await self._register(registry_key, replica_id)

    async def take_back(self, registry_keys: Iterable[str], replica_id: str) -> None:
        """Take keys back that a replica may have taken over with what it has not accepted.

        Those that this replica does not hold are released.
        """
        for registry_key in registry_keys:
            if registry_key in self.held:
                await self.take_from(registry_key, replica_id)
            else:
                with suppress(RegistryUnavailable):
                    await self._send_release(registry_key, replica_id)

    def handed_over(self, registry_keys: Iterable[str]) -> None:
        """Leave keys to the replica that has taken them over."""
        self.held.difference_update(registry_keys)

    async def check_local(self, resource_id: str, registry_key: str) -> None:
        """Redirect to the replica that has a resource, which may have been moved.

        The id begins with the id of its first replica, and the key names the replica that has
        received it. The first one may have drained, and stopped, since the last heartbeat. If the
        registry does not respond, it is taken to be there unless it was draining. The first replica
        itself keeps the new address for a limited time only.
        """
        replica_id = replica_id_of(resource_id)
        if replica_id is None:
            return
        try:
            await self._cluster.check_local(replica_id)
        except RedirectToReplica:
            try:
                await self.check_holder(registry_key)
            except ClusterUnavailable:
                replica = self._cluster.find(replica_id)
                if replica is not None and replica.state == "draining":
                    raise
            raise
        except ReplicaGone:
            await self.check_holder(registry_key)
            raise
        if not self._cluster.is_standalone:
            await self.check_holder(registry_key)

    async def check_holder(self, registry_key: str) -> str | None:
        """Raise RedirectToReplica if another known replica holds the key; returns its holder."""
        try:
            with self._cluster.count_failures("holder"):
                holder = await self._cluster.registry.holder(registry_key)
        except RegistryUnavailable:
            raise ClusterUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS) from None
        replica = None if holder is None else self._cluster.find(holder)
        if replica is not None and holder != self._cluster.own_id:
            raise RedirectToReplica(replica.url)
        return holder

    def _has(self, claim: IdempotencyClaim) -> bool:
        """True if the claim has its key, and not a later claim of the same key."""
        entry = self._entries.get(claim.registry_key)
        return entry is not None and entry.claim is claim

    def _drop_expired(self) -> None:
        while self._ended and self._ended[0][0] <= self._clock():
            _, claim = self._ended.popleft()
            self.release(claim)

    async def _hold(self, registry_key: str) -> None:
        """Register a key. Raises RedirectToReplica if another replica holds it."""
        is_held = False
        self.held.add(registry_key)
        try:
            await self._cluster.check_local(await self._register_if_available(registry_key))
            is_held = True
        except ReplicaGone:
            # The holder has left since the claim. A retry can take its claim over.
            raise ClusterUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS) from None
        finally:
            if not is_held:
                self.held.discard(registry_key)

    async def _register_if_available(self, registry_key: str) -> str:
        """Register a key, later if the registry does not respond; returns its holder."""
        if not self._cluster.unavailable:
            try:
                return await self._register(registry_key)
            except RegistryUnavailable:
                self._cluster.request_heartbeat()
        self._metrics.unregistered_keys.inc()
        return self._cluster.own_id

    async def _release_now(self, registry_key: str) -> None:
        """Release a key, and send the release at once if the registry is available.

        The key must not be claimed here meanwhile. If this call is cancelled, the next heartbeat
        sends the release.
        """
        self.unregister(registry_key)
        if registry_key in self._unsent_releases and not self._cluster.unavailable:
            with suppress(RegistryUnavailable):
                await self._send_release(registry_key, self._cluster.own_id)
                self._unsent_releases.discard(registry_key)

    async def _sync(self, is_reset: bool) -> bool:
        """Send what the registry does not know yet; returns whether nothing is left.

        After a reset it may have lost all keys. At most `MAX_KEYS_PER_HEARTBEAT` claims, and as
        many releases, are sent, so that the next heartbeat is not delayed. Only one call may run at
        a time; `_release_now` may run meanwhile.
        """
        if is_reset:
            self._unsent_claims |= self.held
        for registry_key in _pop_some(self._unsent_releases):
            if registry_key in self.held:
                continue
            try:
                await self._send_release(registry_key, self._cluster.own_id)
            except BaseException:
                self._unsent_releases.add(registry_key)
                raise
            if registry_key in self.held:
                self._unsent_claims.add(registry_key)
        for registry_key in _pop_some(self._unsent_claims):
            if registry_key in self.held:
                await self._register(registry_key)
                if registry_key not in self.held:
                    self._unsent_releases.add(registry_key)
        return not (self._unsent_claims or self._unsent_releases)

    async def _register(self, registry_key: str, source: str | None = None) -> str:
        """Claim a key in the registry, or take it from `source`; returns the id of its holder.

        A holder that is no longer registered is replaced, if the view is settled.
        """
        cluster = self._cluster
        with cluster.count_failures("claim" if source is None else "transfer"):
            return await cluster.registry.claim(
                registry_key,
                cluster.own_id,
                source=source,
                ttl_seconds=CLAIM_SECONDS,
                allow_takeover=cluster.is_settled,
            )

    async def _send_release(self, registry_key: str, replica_id: str) -> None:
        with self._cluster.count_failures("release"):
            await self._cluster.registry.release(registry_key, replica_id)


def _pop_some(registry_keys: set[str]) -> Iterator[str]:
    """Keys to send in one heartbeat, each removed when it is due.

    There may be fewer than at the start, because `_release_now` removes keys meanwhile.
    """
    for _ in range(min(len(registry_keys), MAX_KEYS_PER_HEARTBEAT)):
        if not registry_keys:
            return
        yield registry_keys.pop()
