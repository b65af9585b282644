import pytest

from service.prompt_kv.bandwidth import (
    BURST_SECONDS,
    MIN_PIECE_BYTES,
    PIECE_BYTES,
    RateLimiter,
    ReaderRate,
)


class Time:
    """A clock that advances only by sleeping."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_pacing_takes_the_expected_time() -> None:
    time = Time()
    pace = RateLimiter(1000.0, clock=time.clock, sleep=time.sleep)
    for _ in range(20):
        pace.acquire(500)
    assert time.now - 100.0 == pytest.approx(10.0)


def test_unused_time_is_not_saved_up() -> None:
    time = Time()
    pace = RateLimiter(1000.0, clock=time.clock, sleep=time.sleep)
    time.now += 3600
    began = time.now
    pace.acquire(1000)
    assert time.now - began == pytest.approx(1.0 - BURST_SECONDS)


def test_unlimited_rate_never_waits() -> None:
    time = Time()
    RateLimiter(None, clock=time.clock, sleep=time.sleep).acquire(2**60)
    assert time.now == 100.0


@pytest.mark.parametrize(
    ("bytes_per_second", "expected"),
    [(None, PIECE_BYTES), (1e12, PIECE_BYTES), (1e6, 10**5), (1.0, MIN_PIECE_BYTES)],
)
def test_piece_takes_a_short_time_to_send(bytes_per_second: float | None, expected: int) -> None:
    assert RateLimiter(bytes_per_second).piece_bytes == expected


def test_reader_below_the_least_rate_over_a_window_is_too_slow() -> None:
    rate = ReaderRate(100.0, 10.0)
    rate.on_sent(1000)
    rate.on_waited(10.0)
    assert not rate.is_too_slow
    rate.on_sent(999)
    rate.on_waited(9.5)
    assert (rate.is_too_slow, rate.seconds_left) == (False, 0.5)
    rate.on_waited(0.5)
    assert (rate.is_too_slow, rate.seconds_left) == (True, 10.0)


def test_reader_never_waited_for_is_not_too_slow() -> None:
    rate = ReaderRate(100.0, 10.0)
    for _ in range(100):
        rate.on_sent(1)
    assert not rate.is_too_slow
