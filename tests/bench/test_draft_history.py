"""Replayed replicas that share their samples reach the accepted length of one store for all."""

from typing import Any

import pytest

from bench.draft_history import MIN_RATIO, Link, one_store, own_stores, sharing
from bench.replay.traces import TRACES, Trace
from kernels.draft_index import store

pytestmark = pytest.mark.skipif(
    not store.is_built(), reason="the library was not built: no C++ compiler when it was installed"
)


MORE_CASES = [(2, 64), (4, 16), (4, 64)]


@pytest.fixture(scope="module", params=["1.0", "0.6"])
def trace(request: Any) -> Trace:
    return Trace.load(TRACES / f"seedling-{request.param}.npz")


@pytest.mark.parametrize(
    ("num_replicas", "interval"),
    [(2, 16), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE_CASES)],
)
def test_accepted_length_is_within_two_percent_of_one_store(
    trace: Trace, num_replicas: int, interval: int
) -> None:
    shared = one_store(trace, num_replicas, seed=1)
    own = own_stores(trace, num_replicas, seed=1)
    link = Link()
    found = sharing(trace, num_replicas, seed=1, interval=interval, link=link)
    assert found.emitted == shared.emitted == own.emitted
    assert link.num_tokens == trace.num_tokens
    assert found.accepted_length >= MIN_RATIO * shared.accepted_length
    assert own.accepted_length < 0.9 * shared.accepted_length


def test_one_replica_exchanges_with_nobody(trace: Trace) -> None:
    found = sharing(trace, 1, seed=1, interval=16, link=Link())
    assert found == one_store(trace, 1, seed=1) == own_stores(trace, 1, seed=1)


def test_lost_entries_cost_accepted_tokens_and_nothing_else(trace: Trace) -> None:
    complete, lossy, lost = (
        sharing(trace, 4, seed=1, interval=64, link=Link(loss=loss)) for loss in (0.0, 0.5, 1.0)
    )
    assert complete.emitted == lossy.emitted == lost.emitted
    assert complete.accepted_length > lossy.accepted_length > lost.accepted_length
    assert lost.accepted_length == own_stores(trace, 4, seed=1).accepted_length
