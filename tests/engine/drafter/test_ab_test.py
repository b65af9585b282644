"""A/B tests of drafters: alternation by window, and the verdict."""

import random

from engine.drafter.service.promotion import WINDOW_DRAFTS, WINDOWS_PER_SIDE, AbTest


def stood(old: float, new: float, *, seed: int = 0) -> tuple[str, list[str]]:
    """The verdict, and the serving drafter per window; each call is a quarter of a window."""
    chance, trial, served = random.Random(seed), AbTest(), ["new"]
    while True:
        acceptance_rate = new if trial.side == "new" else old
        num = WINDOW_DRAFTS // 4
        side, outcome = (
            trial.side,
            trial.update(num, sum(chance.random() < acceptance_rate for _ in range(num))),
        )
        if outcome in ("promoted", "rolled_back"):
            return outcome, served
        if outcome != side:
            served.append(outcome)


def test_both_drafters_alternate_equally_often() -> None:
    _, served = stood(0.5, 0.5)
    assert served == ["new", "old"] * WINDOWS_PER_SIDE


def test_better_drafter_is_kept_and_a_worse_one_dropped() -> None:
    for seed in range(20):
        assert stood(0.5, 0.7, seed=seed)[0] == "promoted"
        assert stood(0.7, 0.5, seed=seed)[0] == "rolled_back"


def test_without_traffic_nothing_is_decided() -> None:
    trial = AbTest()
    assert {trial.update(0, 0) for _ in range(100)} == {"new"}
