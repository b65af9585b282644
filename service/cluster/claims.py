"""The idempotency keys that are this replica's, and what the directory is yet to hear of them.

What was released, and after a loss what is claimed, is told with the heartbeats. A place may be
claimed anew, or released, while the directory is told of it.
"""

from collections.abc import Awaitable, Callable

MAX_CLAIMS_PER_HEARTBEAT = 2000


class Claims:
    """`claim` and `release` tell the directory of one place; DirectoryLost."""

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

    def add(self, claim_key: str) -> None:
        self._claimed.add(claim_key)

    def discard(self, claim_key: str) -> None:
        """It never became ours."""
        self._claimed.discard(claim_key)

    def release(self, claim_key: str) -> bool:
        """Whether the directory is yet to hear that it is free. Again changes nothing."""
        if claim_key in self._claimed:
            self._claimed.remove(claim_key)
            self._unsynced_releases.add(claim_key)
        return claim_key in self._unsynced_releases

    async def sync_release(self, claim_key: str) -> None:
        """At once: nobody claims the place here meanwhile."""
        await self._release(claim_key)
        self._unsynced_releases.discard(claim_key)

    def on_registry_reset(self) -> None:
        """By the directory: it is to hear of all of them again."""
        self._unsynced_claims |= self._claimed

    async def sync(self) -> bool:
        """Whether all is told; not so many at once that the next heartbeat would be late."""
        for _ in range(min(len(self._unsynced_releases), MAX_CLAIMS_PER_HEARTBEAT)):
            claim_key = self._unsynced_releases.pop()
            if claim_key in self._claimed:
                continue
            try:
                await self._release(claim_key)
            except BaseException:
                self._unsynced_releases.add(claim_key)
                raise
            if claim_key in self._claimed:
                self._unsynced_claims.add(claim_key)
        for _ in range(min(len(self._unsynced_claims), MAX_CLAIMS_PER_HEARTBEAT)):
            claim_key = self._unsynced_claims.pop()
            if claim_key in self._claimed:
                await self._claim(claim_key)
                if claim_key not in self._claimed:
                    self._unsynced_releases.add(claim_key)
        return not (self._unsynced_claims or self._unsynced_releases)
