"""Transfer of idempotency keys from a replica whose rollouts move to another one.

The id of a moved rollout is registered as a key, too, so that every replica finds the new one.
"""

from collections.abc import Sequence
from contextlib import suppress

from service.cluster.membership import RETRY_AFTER_SECONDS, ClusterMembership
from service.cluster.registry import CLAIM_SECONDS, RegistryUnavailable, replica_id_of
from service.errors import ClusterUnavailable, InvalidRequest, RedirectToReplica, ReplicaGone


class KeyTransfers:
    """Keys in the cluster registry that this replica takes over, hands over, or looks up."""

    def __init__(self, cluster: ClusterMembership) -> None:
        self._cluster = cluster

    async def check_source(self, source: str) -> None:
        """Refuse work that no other replica of the cluster has sent."""
        if not self._cluster.is_standalone and self._cluster.find(source) is None:
            with suppress(RegistryUnavailable):
                await self._cluster.refresh()
        if source == self._cluster.own_id or self._cluster.find(source) is None:
            raise InvalidRequest.of_parameter("source", "is no other replica of this cluster")

    async def check_local(self, resource_id: str, claim_key: str) -> None:
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
                await self.check_holder(claim_key)
            except ClusterUnavailable:
                replica = self._cluster.find(replica_id)
                if replica is not None and replica.state == "draining":
                    raise
            raise
        except ReplicaGone:
            await self.check_holder(claim_key)
            raise
        if not self._cluster.is_standalone:
            await self.check_holder(claim_key)

    async def check_holder(self, claim_key: str) -> str | None:
        """Raise RedirectToReplica if another known replica holds the key; returns its holder."""
        try:
            with self._cluster.count_failures("holder"):
                holder = await self._cluster.registry.holder(claim_key)
        except RegistryUnavailable:
            raise ClusterUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS) from None
        if holder is None or holder == self._cluster.own_id:
            return holder
        if (replica := self._cluster.find(holder)) is not None:
            raise RedirectToReplica(replica.url)
        return holder

    async def take_over(self, claim_key: str, source: str) -> None:
        """Take over a key from the replica `source`, which has sent it.

        Raises ClusterUnavailable if the registry does not respond, as other replicas could not find
        the new holder, or if a third replica holds the key.
        """
        if not await self.try_to_take_over(claim_key, source):
            raise ClusterUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS)

    async def try_to_take_over(self, claim_key: str, source: str) -> bool:
        """Take over a key; False if a third replica holds it, which is registered.

        One that is not was the holder before the registry lost the transfer to `source`. Raises
        ClusterUnavailable while it is unknown whether that replica has left.
        """
        self._cluster.claims.add(claim_key)
        try:
            holder = await self._transfer(claim_key, source)
            if holder != self._cluster.own_id:
                holder = await self._cluster.register_claim(claim_key)
            if holder != self._cluster.own_id and holder not in self._cluster.view.replicas:
                raise RegistryUnavailable("the holder may have left")
        except RegistryUnavailable:
            self._cluster.release(claim_key)  # the registry may have executed the transfer
            raise ClusterUnavailable(retry_after_seconds=RETRY_AFTER_SECONDS) from None
        except BaseException:
            self._cluster.release(claim_key)
            raise
        if holder != self._cluster.own_id:
            self._cluster.release(claim_key)
        return holder == self._cluster.own_id

    async def take_back(self, claim_key: str, replica_id: str) -> None:
        """Transfer a key from another replica to this one, which has its rollout."""
        with suppress(RegistryUnavailable):
            await self._transfer(claim_key, replica_id)

    async def restore(self, claim_keys: Sequence[str], replica_id: str) -> None:
        """Take keys back that a replica may have taken over with what it has not accepted.

        Those that this replica does not hold are released.
        """
        for claim_key in claim_keys:
            if claim_key in self._cluster.claims:
                await self.take_back(claim_key, replica_id)
            else:
                await self.release(claim_key, replica_id)

    async def release(self, claim_key: str, replica_id: str) -> None:
        """Release a key that a replica may have taken over, and that this one does not need."""
        with suppress(RegistryUnavailable), self._cluster.count_failures("release"):
            await self._cluster.registry.release(claim_key, replica_id)

    def url_of(self, replica_id: str) -> str | None:
        """URL of a replica; None if it is not known."""
        replica = self._cluster.find(replica_id)
        return None if replica is None else replica.url

    async def _transfer(self, claim_key: str, source: str) -> str:
        with self._cluster.count_failures("transfer"):
            return await self._cluster.registry.transfer(
                claim_key,
                source,
                self._cluster.own_id,
                ttl_seconds=CLAIM_SECONDS,
            )
