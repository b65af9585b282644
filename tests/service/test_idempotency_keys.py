"""Idempotency keys that one replica holds."""

import pytest

from service.errors import IdempotencyInProgress
from service.rollouts.idempotency import IdempotencyClaim, IdempotencyKeys

SECONDS = 60.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def released() -> list[str]:
    return []


@pytest.fixture
def keys(clock: Clock, released: list[str]) -> IdempotencyKeys:
    return IdempotencyKeys(max_seconds=SECONDS, on_released=released.append, clock=clock)


def claim_of(owner: str, key: str = "key", resource: str | None = None) -> IdempotencyClaim:
    return IdempotencyClaim.of(owner, key, b"body", resource)


def test_keys_of_different_owners_and_resources_do_not_conflict(keys: IdempotencyKeys) -> None:
    assert keys.claim(claim_of("one")) is None
    assert keys.claim(claim_of("other")) is None
    assert keys.claim(claim_of("one", resource="moves")) is None
    with pytest.raises(IdempotencyInProgress):
        keys.claim(claim_of("one"))


def test_key_is_released_with_its_own_claim_only(
    keys: IdempotencyKeys, released: list[str]
) -> None:
    first, second = claim_of("one"), claim_of("one")
    keys.claim(first)
    keys.release(first)
    keys.claim(second)
    keys.release(first)
    assert released == [first.cluster_key]
    with pytest.raises(IdempotencyInProgress):
        keys.claim(claim_of("one"))


def test_key_outlives_its_rollout_for_a_fixed_time(
    keys: IdempotencyKeys, clock: Clock, released: list[str]
) -> None:
    claim = claim_of("one")
    keys.claim(claim)
    keys.bind(claim, "rollout")
    keys.ended(claim)
    clock.now = SECONDS - 1
    assert keys.claim(claim_of("one")) == "rollout"
    clock.now = SECONDS
    assert keys.claim(claim_of("one")) is None
    assert released == [claim.cluster_key]
