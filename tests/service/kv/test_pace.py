import pytest

from service.kv.pace import BURST_SECONDS, Pace


class Time:
    """Sleeping is what makes it pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_bytes_take_the_time_they_are_given() -> None:
    time = Time()
    pace = Pace(1000.0, clock=time.clock, sleep=time.sleep)
    for _ in range(20):
        pace.spend(500)
    assert time.now - 100.0 == pytest.approx(10.0)


def test_what_was_not_spent_is_not_saved_up() -> None:
    time = Time()
    pace = Pace(1000.0, clock=time.clock, sleep=time.sleep)
    time.now += 3600
    began = time.now
    pace.spend(1000)
    assert time.now - began == pytest.approx(1.0 - BURST_SECONDS)


def test_without_a_bound_nobody_waits() -> None:
    time = Time()
    Pace(None, clock=time.clock, sleep=time.sleep).spend(2**60)
    assert time.now == 100.0
