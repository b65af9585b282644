"""Updates of idempotency claims that are sent by several heartbeats at once."""

import asyncio

from service.cluster.idempotency_claims import Claims


class SlowRegistry:
    """Registry whose calls end in a later iteration of the event loop."""

    def __init__(self) -> None:
        self.claimed: list[str] = []
        self.released: list[str] = []
        self.claims = Claims(claim=self._claim, release=self._release)

    async def _claim(self, claim_key: str) -> None:
        await asyncio.sleep(0)
        self.claimed.append(claim_key)

    async def _release(self, claim_key: str) -> None:
        await asyncio.sleep(0)
        self.released.append(claim_key)


async def test_concurrent_heartbeats_send_each_update_once() -> None:
    registry = SlowRegistry()
    for key in ("a", "b", "c", "d"):
        registry.claims.add(key)
    for key in ("a", "b", "c"):
        registry.claims.release(key)
    registry.claims.on_registry_reset()
    await asyncio.gather(registry.claims.sync(), registry.claims.sync())
    assert sorted(registry.released) == ["a", "b", "c"]
    assert registry.claimed == ["d"]
    assert await registry.claims.sync()
