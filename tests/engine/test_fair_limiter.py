"""Turns of clients at work that is limited, and the limits of what waits."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from engine.errors import QueueFull
from engine.fair_limiter import FairLimiter

pytestmark = pytest.mark.asyncio


class Jobs:
    """Work that ends when `go` is set; `begun` lists it in the order in which it began."""

    def __init__(self, limiter: FairLimiter) -> None:
        self.limiter = limiter
        self.go = asyncio.Event()
        self.begun: list[str] = []
        self.num_running = 0

    def start(self, client: str, num_bytes: int = 0, name: str = "") -> "asyncio.Task[str]":
        return asyncio.create_task(self.limiter.run(client, num_bytes, self._work(name or client)))

    def _work(self, name: str) -> Callable[[], Awaitable[str]]:
        async def work() -> str:
            self.num_running += 1
            self.begun.append(name)
            await self.go.wait()
            self.num_running -= 1
            return name

        return work

    async def until_waiting(self, number: int, *, num_running: int = 1) -> None:
        async with asyncio.timeout(30):
            while self.limiter.num_waiting < number or self.num_running < num_running:
                await asyncio.sleep(0)


def limited(num_places: int = 1, key_bytes: int = 12, total_bytes: int = 24) -> Jobs:
    return Jobs(FairLimiter("work", num_places, key_bytes=key_bytes, total_bytes=total_bytes))


async def test_keys_take_turns_and_then_the_sessions_of_a_key() -> None:
    jobs = limited()
    tasks = [jobs.start(f"a/{number}", name=f"a{number}") for number in range(4)]
    tasks += [jobs.start("a/1", name="a1 again"), jobs.start("b", name="b")]
    tasks += [jobs.start("b", name="b again"), jobs.start("c", name="c")]
    await jobs.until_waiting(7)
    jobs.go.set()
    await asyncio.gather(*tasks)
    first = [jobs.begun.index(name) for name in ("b", "c", "a1", "b again")]
    assert max(first) <= 4, "one piece of each key, before any key has two more"
    assert jobs.begun.index("a3") < jobs.begun.index("a1 again")


async def test_places_are_limited_and_one_client_has_one() -> None:
    jobs = limited(num_places=2)
    tasks = [jobs.start("a", name="a") for _ in range(3)]
    await jobs.until_waiting(2)
    assert jobs.num_running == 1
    tasks += [jobs.start(client) for client in "bc"]
    await jobs.until_waiting(3, num_running=2)
    assert jobs.num_running == 2
    jobs.go.set()
    await asyncio.gather(*tasks)
    assert not jobs.limiter._clients


async def test_work_is_bounded_per_key_and_in_total() -> None:
    jobs = limited(key_bytes=10, total_bytes=25)
    accepted = [jobs.start("a", 9), jobs.start("b", 9)]
    await jobs.until_waiting(1)
    with pytest.raises(QueueFull, match="of this API key") as of_key:
        await jobs.start("a", 2)
    with pytest.raises(QueueFull) as of_all:
        await jobs.start("c", 9)
    assert of_key.value.of_client and not of_all.value.of_client
    accepted += [jobs.start("c", 0), jobs.start("c", 7)]
    jobs.go.set()
    assert len(await asyncio.gather(*accepted)) == 4
    assert await jobs.start("d", 1000), "work of any size is accepted alone"


async def test_session_has_a_quarter_of_what_its_key_may_have() -> None:
    jobs = limited(key_bytes=12, total_bytes=100)
    accepted = [jobs.start("a/0", 9), jobs.start("a/1", 2)]
    await jobs.until_waiting(1)
    with pytest.raises(QueueFull):  # more than a quarter of what the key may have
        await jobs.start("a/1", 2)
    with pytest.raises(QueueFull):  # more than the key may have
        await jobs.start("a/3", 2)
    accepted.append(jobs.start("a/1", 1))
    jobs.go.set()
    await asyncio.gather(*accepted)


async def test_waiting_work_of_a_cancelled_caller_is_dropped() -> None:
    jobs = limited(total_bytes=100)
    tasks = [jobs.start(client, 9) for client in "abc"]
    await jobs.until_waiting(2)
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    while jobs.limiter.num_waiting > 1:
        await asyncio.sleep(0)
    accepted = jobs.start("b", 6)
    jobs.go.set()
    await asyncio.gather(tasks[0], tasks[2], accepted)
    assert jobs.begun == ["a", "c", "b"]


async def test_running_work_of_a_cancelled_caller_keeps_its_place() -> None:
    jobs = limited()
    running = jobs.start("a", 9)
    await jobs.until_waiting(0)
    waiting = jobs.start("b")
    await jobs.until_waiting(1)
    running.cancel()
    await asyncio.wait([running])
    with pytest.raises(QueueFull):
        await jobs.start("a", 9)
    assert jobs.begun == ["a"]
    jobs.go.set()
    assert await waiting == "b"


async def test_error_of_work_is_that_of_its_caller_and_frees_the_place() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    jobs = limited()
    with pytest.raises(ValueError, match="broken"):
        await jobs.limiter.run("a", 1, fail)
    jobs.go.set()
    assert await jobs.start("a", 12) == "a"
