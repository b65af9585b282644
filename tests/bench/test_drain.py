"""Rows of the benchmarks of drains and of rebalancing, and the batches of the latter."""

import pytest

from bench import drain, rebalance


@pytest.mark.parametrize(
    ("seconds", "verdict"), [([1.0, 1.5, 9.0], "met"), ([2.5, 2.0, 1.0], "not met")]
)
def test_median_of_the_drains_is_compared_with_the_goal(seconds: list[float], verdict: str) -> None:
    record = drain.record(drain.Runs(seconds, [100] * 3), drain.Runs([30.0], [100]))
    assert [row.verdict for row in record.rows] == [verdict, ""]
    assert record.rows[1].value == "median 30.00 s, longest 30.00 s"


def test_first_batch_has_all_long_groups_on_one_replica() -> None:
    all_at_once, queued, *drawn = rebalance.cases(3)
    assert all_at_once.lengths == queued.lengths == ((2000,) * 4, (250,) * 4)
    assert (all_at_once.num_sequences, queued.num_sequences) == (128, 32)
    assert [len(own) for case in drawn for own in case.lengths] == [4] * 6
    assert rebalance.cases(3) == [all_at_once, queued, *drawn]


def test_ratios_of_the_first_batches_are_compared_with_the_goal() -> None:
    without, with_it = [30.0, 11.0, 20.0, 20.0], [20.0, 10.0, 20.0, 10.0]
    record = rebalance.record(rebalance.cases(2), without, with_it)
    assert [row.verdict for row in record.rows] == ["met", "not met", ""]
    assert record.rows[0].value == "1.50: 30.0 -> 20.0 s"
    assert record.rows[2].value == "median 1.50, 1.00 to 2.00"
