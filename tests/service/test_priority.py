"""Scheduling priority with ageing: no group is overtaken forever."""

import asyncio
import heapq
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from service.rollouts.fairness import MICROSECONDS, PriorityAging
from tests.fake_engine import FakeEngine
from tests.service.test_rollouts import body, group, running_samples
from tests.serving import serving

BOUND = 10.0
PRIORITIES = st.one_of(st.integers(-3, 3), st.integers(-(2**31), 2**31 - 1))
ARRIVALS = st.lists(st.tuples(st.floats(0, 40), PRIORITIES), min_size=2, max_size=30)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ranked(arrivals: list[tuple[float, int]]) -> list[tuple[float, int, int]]:
    """Ranks of groups by arrival time and priority, in the order of their arrival."""
    clock = Clock()
    ranks = PriorityAging(overtaken_seconds=BOUND, clock=clock)
    found = []
    for arrived, priority in sorted(arrivals, key=lambda each: each[0]):
        clock.now = arrived
        found.append((arrived, priority, ranks.to_engine_priority(priority)))
    return found


@given(ARRIVALS)
def test_waiting_group_eventually_outranks_all_new_arrivals(
    arrivals: list[tuple[float, int]],
) -> None:
    groups = ranked(arrivals)
    for arrived, _, to_engine_priority in groups:
        for later, _, other in groups:
            if later > arrived + BOUND + 1 / MICROSECONDS:
                assert to_engine_priority < other


@given(ARRIVALS, st.floats(0.1, 3))
def test_number_of_later_arrivals_served_first_is_bounded(
    arrivals: list[tuple[float, int]], seconds_each: float
) -> None:
    """One server, one group at a time, the lowest rank first, for any order of arrivals."""
    groups = ranked(arrivals)
    waiting: list[tuple[int, float]] = []
    now, coming = 0.0, list(groups)
    while coming or waiting:
        while coming and (coming[0][0] <= now or not waiting):
            arrived, _, to_engine_priority = coming.pop(0)
            now = max(now, arrived)
            heapq.heappush(waiting, (to_engine_priority, arrived))
        _, arrived = heapq.heappop(waiting)
        left = [other for _, other in waiting]
        assert all(other >= arrived - BOUND - 1e-3 for other in left), "somebody was overtaken"
        now += seconds_each


@given(st.floats(0, 40), PRIORITIES, PRIORITIES)
def test_of_groups_that_arrive_together_the_lower_priority_is_first(
    arrived: float, one: int, other: int
) -> None:
    low, high = sorted((one, other))
    (_, _, first), (_, _, second) = ranked([(arrived, low), (arrived, high)])
    assert first <= second
    if low < high and abs(low) < 100 and abs(high) < 100:
        assert first < second


@given(st.floats(0, 40), st.floats(0.001, 40), PRIORITIES)
def test_groups_of_equal_priority_are_served_in_order_of_arrival(
    arrived: float, gap: float, priority: int
) -> None:
    (_, _, first), (_, _, second) = ranked([(arrived, priority), (arrived + gap, priority)])
    assert first < second


async def test_all_samples_of_a_group_have_its_rank(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with serving(engine, tmp_path) as served, asyncio.TaskGroup() as tasks:
        for priority, so_far in ((1, 2), (0, 4)):
            asked = body(group(1, n=2), priority=priority)
            tasks.create_task(served.http.post("/v1/rollouts", json=asked))
            await running_samples(served, so_far)
        ranks = [sample.request.priority for sample in engine.running.values()]
        engine.step(4)
    assert ranks[0] == ranks[1] > ranks[2] == ranks[3]
