"""Registration of idempotency keys in a cluster registry that fails."""

import asyncio

import pytest

from service.cluster.idempotency_keys import MAX_KEYS_PER_HEARTBEAT
from service.errors import ClusterUnavailable, RedirectToReplica
from tests.service.cluster.test_membership import EXPIRE, A, B, MembershipProbe


@pytest.fixture
def refresh() -> MembershipProbe:
    return MembershipProbe()


async def test_after_a_flush_keys_are_claimed_again(refresh: MembershipProbe) -> None:
    await refresh.beat()
    await refresh.claim("p")
    await refresh.claim("q")
    refresh.release("q")
    refresh.registry.forget()
    await refresh.beat()
    holders = [await refresh.claimed_by(B, key) for key in "pq"]
    assert holders == [A.id, B.id]


async def test_key_reclaimed_before_its_release_was_sent_stays_local(
    refresh: MembershipProbe,
) -> None:
    await refresh.beat()
    await refresh.claim("p")
    refresh.release("p")
    await refresh.claim("p")
    await refresh.beat()
    assert await refresh.claimed_by(B, "p") == A.id


async def test_key_reclaimed_while_its_release_is_sent_stays_local(
    refresh: MembershipProbe,
) -> None:
    await refresh.beat()
    await refresh.claim("p")
    refresh.release("p")
    refresh.registry.releasing = lambda: refresh.claim("p")
    await refresh.beat()
    assert await refresh.claimed_by(B, "p") == A.id


@pytest.mark.parametrize("silent", [False, True])
async def test_released_key_is_available_at_once_or_after_the_next_heartbeat(
    refresh: MembershipProbe, silent: bool
) -> None:
    await refresh.beat()

    async def fail() -> None:
        refresh.registry.silent = silent

    await refresh.refuse("p", fail)
    refresh.registry.silent = False
    if silent:
        assert refresh.failed == ["release"]
        await refresh.beat()
    assert await refresh.claimed_by(B, "p") == B.id


async def test_many_released_keys_do_not_delay_the_next_heartbeat(
    refresh: MembershipProbe,
) -> None:
    await refresh.beat()
    keys = [f"p{number}" for number in range(MAX_KEYS_PER_HEARTBEAT + 1)]
    for key in keys:
        await refresh.claim(key)
        refresh.release(key)
    left = []
    for _ in "ab":
        await refresh.beat()
        left.append(refresh.registry.num_claims)
    assert left == [1, 0]


async def test_key_claimed_during_an_outage_is_shared_after_recovery(
    refresh: MembershipProbe,
) -> None:
    await refresh.beat()
    refresh.registry.silent = True
    await refresh.claim("p")
    await refresh.beat()
    await refresh.claim("q")
    assert (refresh.num_unshared, refresh.failed) == (2, ["claim", "heartbeat"])
    refresh.registry.silent = False
    await refresh.beat()
    holders = [await refresh.claimed_by(B, key) for key in "pq"]
    assert holders == [A.id, A.id]


async def test_key_of_a_replica_that_may_return_is_not_taken_over(refresh: MembershipProbe) -> None:
    await refresh.claimed_by(B, "p")
    await refresh.beat()
    with pytest.raises(ClusterUnavailable):
        await refresh.claim("p")
    await refresh.pass_by(EXPIRE + 3)
    await refresh.claim("p")
    assert await refresh.claimed_by(B, "p") == A.id


async def test_key_of_another_replica_is_not_claimed_after_a_flush(
    refresh: MembershipProbe,
) -> None:
    await refresh.pass_by(EXPIRE + 3, B)
    await refresh.claimed_by(B, "p")
    with pytest.raises(RedirectToReplica):
        await refresh.claim("p")
    refresh.registry.forget()
    await refresh.beat()
    assert await refresh.claimed_by(B, "p") == B.id


async def test_release_is_not_sent_at_once_during_an_outage(refresh: MembershipProbe) -> None:
    await refresh.beat()

    async def fail() -> None:
        refresh.registry.silent = True
        await refresh.beat()

    await refresh.refuse("p", fail)
    assert refresh.failed == ["heartbeat"]


async def test_key_that_is_released_at_once_is_left_out_of_a_running_heartbeat(
    refresh: MembershipProbe,
) -> None:
    await refresh.beat()
    for key in "pq":
        await refresh.claim(key)
        refresh.release(key)
    is_blocked, unblock, num_releases = asyncio.Event(), asyncio.Event(), 0

    async def block() -> None:
        nonlocal num_releases
        num_releases += 1
        if num_releases == 1:
            is_blocked.set()
            await unblock.wait()

    refresh.registry.releasing = block
    heartbeat = asyncio.create_task(refresh.beat())
    await is_blocked.wait()
    (pending,) = refresh.keys._unsent_releases
    await refresh.refuse(pending.removeprefix("local\n"))
    unblock.set()
    await heartbeat
    assert (num_releases, refresh.registry.num_claims) == (2, 0)


async def test_release_that_fails_is_sent_with_the_next_heartbeat(refresh: MembershipProbe) -> None:
    await refresh.beat()
    await refresh.claim("p")
    refresh.release("p")

    async def fail() -> None:
        refresh.registry.silent = True

    refresh.registry.releasing = fail
    await refresh.beat()
    assert (refresh.failed, refresh.registry.num_claims) == (["release"], 1)
    refresh.registry.releasing, refresh.registry.silent = None, False
    await refresh.beat()
    assert refresh.registry.num_claims == 0


async def test_key_that_is_released_while_its_claim_is_sent_is_released_again(
    refresh: MembershipProbe,
) -> None:
    await refresh.beat()
    await refresh.claim("p")

    async def release() -> None:
        refresh.registry.claiming = None
        refresh.release("p")
        refresh.keys._unsent_releases.clear()  # sent before the claim has arrived

    refresh.registry.forget()
    refresh.registry.claiming = release
    await refresh.beat()
    assert refresh.registry.num_claims == 1
    await refresh.beat()
    assert refresh.registry.num_claims == 0
