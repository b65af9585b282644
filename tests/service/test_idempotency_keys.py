"""Idempotency keys that one replica holds."""

import pytest

from service.cluster.idempotency_claim import IdempotencyClaim
from service.cluster.idempotency_keys import IdempotencyKeys
from service.errors import IdempotencyInProgress, InvalidRequest
from tests.service.cluster.test_membership import KEEP_SECONDS, MembershipProbe


@pytest.fixture
def probe() -> MembershipProbe:
    return MembershipProbe()


@pytest.fixture
def keys(probe: MembershipProbe) -> IdempotencyKeys:
    return probe.keys


def claim_of(owner: str, key: str = "key", resource: str | None = None) -> IdempotencyClaim:
    return IdempotencyClaim.of(owner, key, b"body", resource)


@pytest.mark.parametrize("key", ["", "k\n", "move\n1", "a b", "\u00e4", "k" * 256])
def test_key_of_a_request_is_visible_ascii(key: str) -> None:
    """Also in a state from another replica, where it is no header."""
    with pytest.raises(InvalidRequest, match="Idempotency-Key"):
        IdempotencyClaim.of("owner", key, bytes(32))


def test_keys_of_different_owners_and_resources_do_not_conflict(keys: IdempotencyKeys) -> None:
    assert keys.claim(claim_of("one")) is None
    assert keys.claim(claim_of("other")) is None
    assert keys.claim(claim_of("one", resource="moves")) is None
    with pytest.raises(IdempotencyInProgress):
        keys.claim(claim_of("one"))


async def test_key_is_released_with_its_own_claim_only(keys: IdempotencyKeys) -> None:
    first, second = claim_of("one"), claim_of("one")
    async with keys.claimed(first):
        pass
    keys.release(first)
    assert keys.held == set()
    async with keys.claimed(second):
        pass
    keys.release(first)
    assert keys.held == {second.registry_key}
    with pytest.raises(IdempotencyInProgress):
        keys.claim(claim_of("one"))


async def test_key_outlives_its_rollout_for_a_fixed_time(
    probe: MembershipProbe, keys: IdempotencyKeys
) -> None:
    claim = claim_of("one")
    async with keys.claimed(claim):
        keys.bind(claim, "rollout")
    keys.ended(claim)
    probe.clock.now = KEEP_SECONDS - 1
    assert keys.claim(claim_of("one")) == "rollout"
    probe.clock.now = KEEP_SECONDS
    assert keys.claim(claim_of("one")) is None
    assert keys.held == set()
