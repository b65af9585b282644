"""Idempotency keys that this replica has claimed, and their updates to the cluster registry.

Releases, and all claims after a registry reset, are sent with the heartbeats. A key can be claimed
or released again while its previous state is being sent.
"""

from collections.abc import Awaitable, Callable, Iterator

MAX_CLAIMS_PER_HEARTBEAT = 2000


class Claims:
    """Idempotency keys claimed by this replica, and updates not yet sent to the cluster registry.

    The callbacks `claim` and `release` send the update of one key to the registry. They raise
    RegistryUnavailable.
    """

    def __init__(
        self,
        *,
        claim: Callable[[str], Awaitable[object]],
        release: Callable[[str], Awaitable[None]],
    ) -> None:
        self._claim = claim
        self._release = release
        self._claimed: set[str] = set()
        self._unsynced_releases: set[str] = set()
        self._unsynced_claims: set[str] = set()

    def __contains__(self, claim_key: str) -> bool:
        return claim_key in self._claimed

    def add(self, claim_key: str) -> None:
        self._claimed.add(claim_key)

    def discard(self, claim_key: str) -> None:
        """Remove an idempotency key whose claim failed."""
        self._claimed.discard(claim_key)

    def release(self, claim_key: str) -> bool:
        """Release an idempotency key; returns whether the registry still has to be informed.

        Idempotent.
        """
        if claim_key in self._claimed:
            self._claimed.remove(claim_key)
            self._unsynced_releases.add(claim_key)
        return claim_key in self._unsynced_releases

    async def sync_release(self, claim_key: str) -> None:
        """Send the release of an idempotency key to the cluster registry immediately.

        The key must not be claimed on this replica meanwhile.
        """
        await self._release(claim_key)
        self._unsynced_releases.discard(claim_key)

    def on_registry_reset(self) -> None:
        """Schedule all claims to be sent again, because the cluster registry may have lost them."""
        self._unsynced_claims |= self._claimed

    async def sync(self) -> bool:
        """Send pending claims and releases to the registry; returns whether none are left.

        At most `MAX_CLAIMS_PER_HEARTBEAT` of each kind are sent, so that the next heartbeat is not
        delayed. Only one call may run at a time; `sync_release` may run meanwhile.
        """
        for claim_key in _pop_some(self._unsynced_releases):
            if claim_key in self._claimed:
                continue
            try:
                await self._release(claim_key)
            except BaseException:
                self._unsynced_releases.add(claim_key)
                raise
            if claim_key in self._claimed:
                self._unsynced_claims.add(claim_key)
        for claim_key in _pop_some(self._unsynced_claims):
            if claim_key in self._claimed:
                await self._claim(claim_key)
                if claim_key not in self._claimed:
                    self._unsynced_releases.add(claim_key)
        return not (self._unsynced_claims or self._unsynced_releases)


def _pop_some(claim_keys: set[str]) -> Iterator[str]:
    """Keys to send in one heartbeat, each removed when it is due.

    There may be fewer than at the start, because `sync_release` removes keys meanwhile.
    """
    for _ in range(min(len(claim_keys), MAX_CLAIMS_PER_HEARTBEAT)):
        if not claim_keys:
            return
        yield claim_keys.pop()
