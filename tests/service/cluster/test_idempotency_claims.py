"""Claims and releases of idempotency keys that are sent with heartbeats, and beside them."""

import asyncio
from collections.abc import Callable

import pytest

from service.cluster.idempotency_claims import Claims
from service.cluster.registry import RegistryUnavailable


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


class Registry:
    """Registry that records its calls; `during` runs in the next one, and may raise."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.during: Callable[[], object] = lambda: None

    async def claim(self, claim_key: str) -> None:
        self._record(f"claim {claim_key}")

    async def release(self, claim_key: str) -> None:
        self._record(f"release {claim_key}")

    def _record(self, call: str) -> None:
        self.calls.append(call)
        during, self.during = self.during, lambda: None
        during()


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def claims(registry: Registry) -> Claims:
    return Claims(claim=registry.claim, release=registry.release)


async def test_release_of_a_key_that_is_claimed_again_is_not_sent(
    registry: Registry, claims: Claims
) -> None:
    claims.add("a")
    claims.release("a")
    claims.add("a")
    assert await claims.sync()
    assert registry.calls == []


async def test_release_that_fails_is_sent_with_the_next_heartbeat(
    registry: Registry, claims: Claims
) -> None:
    def fail() -> None:
        raise RegistryUnavailable()

    claims.add("a")
    claims.release("a")
    registry.during = fail
    with pytest.raises(RegistryUnavailable):
        await claims.sync()
    assert await claims.sync()
    assert registry.calls == ["release a"] * 2


async def test_key_that_is_released_while_its_claim_is_sent_is_released_again(
    registry: Registry, claims: Claims
) -> None:
    def release() -> None:
        claims.release("a")
        claims._unsynced_releases.clear()  # sent before the claim has arrived

    claims.add("a")
    claims.on_registry_reset()
    registry.during = release
    assert not await claims.sync()
    assert await claims.sync()
    assert registry.calls == ["claim a", "release a"]
