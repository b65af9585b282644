"""Ratios over pairs, and their verdicts."""

from bench.harness.paired_runs import Pairs, alternate


def test_clear_ratio_meets_or_misses_its_goal() -> None:
    ratio = Pairs(a=[9.9, 10.0, 10.1, 9.8, 10.2], b=[10.0] * 5).ratio()
    assert ratio.low <= ratio.median == 1.0 <= ratio.high
    assert ratio.verdict(0.9) == "met"
    assert ratio.verdict(1.1) == "missed"


def test_goal_inside_the_interval_is_within_noise() -> None:
    ratio = Pairs(a=[8.0, 9.0, 10.0, 11.0, 12.0], b=[10.0] * 5).ratio()
    assert ratio.verdict(0.95) == "met, within noise"
    assert ratio.verdict(1.05) == "missed, within noise"


def test_drift_shared_by_both_arms_leaves_the_ratio_unchanged() -> None:
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert Pairs(a=[0.5 * d for d in drift], b=drift).ratio().median == 0.5


async def test_arms_alternate_and_none_is_always_first() -> None:
    ran: list[str] = []

    async def a() -> None:
        ran.append("a")

    async def b() -> None:
        ran.append("b")

    await alternate([a, b], rounds=2, warm_up=1)
    assert ran == ["a", "b", "b", "a", "a", "b"]
