"""Rows of the benchmark of drains."""

import pytest

from bench import drain


@pytest.mark.parametrize(
    ("seconds", "verdict"), [([1.0, 1.5, 9.0], "met"), ([2.5, 2.0, 1.0], "not met")]
)
def test_median_of_the_drains_is_compared_with_the_goal(seconds: list[float], verdict: str) -> None:
    record = drain.record(drain.Runs(seconds, [100] * 3), drain.Runs([30.0], [100]))
    assert [row.verdict for row in record.rows] == [verdict, ""]
    assert record.rows[1].value == "median 30.00 s, longest 30.00 s"
