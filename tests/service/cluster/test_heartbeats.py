"""Times at which a replica sends heartbeats to the cluster registry."""

import pytest

from service.cluster.idempotency_keys import MAX_KEYS_PER_HEARTBEAT
from service.cluster.membership import (
    FAST_HEARTBEAT_SECONDS,
    FAST_HEARTBEATS_FOR_SECONDS,
    FIRST_RETRY_SECONDS,
)
from tests.service.cluster.test_membership import SETTINGS, MembershipProbe


@pytest.fixture
def refresh() -> MembershipProbe:
    return MembershipProbe()


async def test_heartbeat_is_sent_now_for_what_is_left(refresh: MembershipProbe) -> None:
    await refresh.beat()
    requested = refresh.cluster._heartbeat_requested
    assert not requested.is_set()
    for number in range(MAX_KEYS_PER_HEARTBEAT + 1):
        await refresh.claim(f"p{number}")
        refresh.release(f"p{number}")
    await refresh.beat()
    assert requested.is_set()
    requested.clear()
    refresh.registry.silent = True
    await refresh.claim("q")
    assert requested.is_set(), "the outage is detected before the next heartbeat is due"


async def test_heartbeats_are_more_frequent_while_a_target_may_change(
    refresh: MembershipProbe,
) -> None:
    cluster, usual = refresh.cluster, SETTINGS.heartbeat_seconds
    assert cluster._delay_seconds() == usual
    cluster.start_fast_heartbeats()
    assert cluster._delay_seconds() == FAST_HEARTBEAT_SECONDS < usual
    cluster.stop_fast_heartbeats()
    assert cluster._delay_seconds() == usual
    cluster.start_fast_heartbeats()
    refresh.clock.now += FAST_HEARTBEATS_FOR_SECONDS
    assert cluster._delay_seconds() == usual


async def test_heartbeats_are_repeated_soon_after_a_failure(refresh: MembershipProbe) -> None:
    refresh.registry.silent = True
    await refresh.beat()
    assert refresh.cluster._delay_seconds() <= 2 * FIRST_RETRY_SECONDS
    for _ in range(10):
        await refresh.beat()
    assert refresh.cluster._delay_seconds() >= SETTINGS.heartbeat_seconds / 2
    refresh.registry.silent = False
    await refresh.beat()
    assert refresh.cluster._delay_seconds() == SETTINGS.heartbeat_seconds
