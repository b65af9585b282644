"""Bandwidth limits and turns of downloads, on a clock set by the test."""

import asyncio

import pytest

from service.prompt_kv.bandwidth import (
    BURST_SECONDS,
    MIN_PIECE_BYTES,
    RateLimiter,
    ReaderRate,
    Turns,
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
    [(None, 2**22), (1e12, 2**22), (1e6, 10**5), (1.0, MIN_PIECE_BYTES)],
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


class Holders:
    """Waiters that hold a turn until released; `granted` lists names in the order of turns."""

    def __init__(self, num_turns: int) -> None:
        self.granted: list[str] = []
        self._turns = Turns(num_turns)
        self._gates: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        """The first character of a name is its key."""
        for name in names:
            self._gates[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._hold(name))
            await settled()

    async def end(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()
            await settled()

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait([self._tasks[name]])
        await settled()

    async def _hold(self, name: str) -> None:
        async with self._turns.turn(name[0]):
            self.granted.append(name)
            await self._gates[name].wait()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_free_turn_goes_to_the_key_with_the_fewest() -> None:
    holders = Holders(2)
    await holders.begin("a1", "a2", "a3", "a4", "b1")
    assert holders.granted == ["a1", "a2"]
    await holders.end("a1")
    assert holders.granted[2:] == ["b1"]
    await holders.end("a2")
    assert holders.granted[3:] == ["a3"]


async def test_keys_with_equal_counts_alternate() -> None:
    holders = Holders(1)
    await holders.begin("c1", "a1", "a2", "b1", "b2")
    for name in ("c1", "a1", "b1", "a2"):
        await holders.end(name)
    assert holders.granted == ["c1", "a1", "b1", "a2", "b2"]


async def test_cancelled_waiter_takes_no_turn_and_leaks_none() -> None:
    holders = Holders(1)
    await holders.begin("a1", "b1", "c1")
    await holders.leave("b1")
    await holders.leave("a1")
    await holders.end("c1")
    await holders.begin("d1")
    assert holders.granted == ["a1", "c1", "d1"]


async def test_waiter_cancelled_at_its_grant_passes_it_on() -> None:
    turns = Turns(1)
    async with turns.turn("a"):
        waiting = asyncio.create_task(turns._take("b"))
        await settled()
    waiting.cancel()  # between the grant and its delivery
    await asyncio.wait([waiting])
    async with asyncio.timeout(5), turns.turn("c"):
        pass
