"""Releases of idempotency keys that a refused request sends during a heartbeat."""

import asyncio

from service.cluster.idempotency_claims import Claims


class BlockedRegistry:
    """Registry that records releases; the first one ends when `unblock` is set."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.is_blocked = asyncio.Event()
        self.unblock = asyncio.Event()

    async def claim(self, claim_key: str) -> None:
        raise AssertionError("nothing is claimed")

    async def release(self, claim_key: str) -> None:
        self.released.append(claim_key)
        if len(self.released) == 1:
            self.is_blocked.set()
            await self.unblock.wait()


async def test_key_that_is_released_at_once_is_left_out_of_a_running_heartbeat() -> None:
    registry = BlockedRegistry()
    claims = Claims(claim=registry.claim, release=registry.release)
    for key in ("a", "b"):
        claims.add(key)
        claims.release(key)
    heartbeat = asyncio.create_task(claims.sync())
    await registry.is_blocked.wait()
    (pending,) = {"a", "b"} - set(registry.released)
    await claims.sync_release(pending)
    registry.unblock.set()
    assert await heartbeat
    assert sorted(registry.released) == ["a", "b"]
