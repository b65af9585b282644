import pytest

from service.prompt_kv.rate_limit import (
    BURST_SECONDS,
    LEAST_PIECE_BYTES,
    PIECE_BYTES,
    RateLimiter,
    ReaderRate,
)


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
    pace = RateLimiter(1000.0, clock=time.clock, sleep=time.sleep)
    for _ in range(20):
        pace.acquire(500)
    assert time.now - 100.0 == pytest.approx(10.0)


def test_what_was_not_spent_is_not_saved_up() -> None:
    time = Time()
    pace = RateLimiter(1000.0, clock=time.clock, sleep=time.sleep)
    time.now += 3600
    began = time.now
    pace.acquire(1000)
    assert time.now - began == pytest.approx(1.0 - BURST_SECONDS)


def test_without_a_bound_nobody_waits() -> None:
    time = Time()
    RateLimiter(None, clock=time.clock, sleep=time.sleep).acquire(2**60)
    assert time.now == 100.0


@pytest.mark.parametrize(
    ("bytes_per_second", "expected"),
    [(None, PIECE_BYTES), (1e12, PIECE_BYTES), (1e6, 10**5), (1.0, LEAST_PIECE_BYTES)],
)
def test_a_piece_is_worth_a_short_time(bytes_per_second: float | None, expected: int) -> None:
    assert RateLimiter(bytes_per_second).piece_bytes == expected


def test_a_reader_that_takes_too_little_over_a_window_is_too_slow() -> None:
    rate = ReaderRate(100.0, 10.0)
    rate.took(1000)
    rate.waited(10.0)
    assert not rate.too_slow
    rate.took(999)
    rate.waited(9.5)
    assert (rate.too_slow, rate.seconds_left) == (False, 0.5)
    rate.waited(0.5)
    assert (rate.too_slow, rate.seconds_left) == (True, 10.0)


def test_a_reader_that_is_never_waited_for_is_not_too_slow() -> None:
    rate = ReaderRate(100.0, 10.0)
    for _ in range(100):
        rate.took(1)
    assert not rate.too_slow
