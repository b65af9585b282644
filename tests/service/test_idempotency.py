"""The table of idempotency keys by itself."""

from service.claim import Claim
from service.idempotency import IdempotencyKeys
from service.rollout import Rollout

CLAIM = Claim.of("owner", "key", b"body")


def claimed() -> Rollout:
    return Rollout("id", [], owner="owner", detached=True, claim=CLAIM)


def test_forgetting_a_failure_leaves_the_key_to_the_retry_that_followed() -> None:
    keys, failed, retry = IdempotencyKeys(), claimed(), claimed()
    for rollout in (failed, retry):
        assert keys.claim(CLAIM) is None
        keys.bind(CLAIM, rollout)
        if rollout is failed:
            keys.release(CLAIM, failed)  # at once, since nothing came of it
    keys.release(CLAIM, failed)  # when it is not kept any more
    assert keys.claim(CLAIM) is retry
    keys.release(CLAIM, retry)
    assert len(keys) == 0


def test_what_was_claimed_and_came_to_nothing_can_be_claimed_again() -> None:
    keys = IdempotencyKeys()
    assert keys.claim(CLAIM) is None
    keys.release(CLAIM, None)
    assert keys.claim(CLAIM) is None
