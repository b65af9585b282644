"""Checks of structured outputs take turns by API key. The worker's process is a fake."""

import asyncio
import json
from typing import Any

import pytest

from engine.errors import ChecksQueueFull, SamplingRefused
from engine.io.fair_turns import FairTurns, TurnLimits
from engine.io.grammar_check import MAX_RESULTS, REFUSAL_SECONDS, GrammarChecker, Results
from engine.types import StructuredOutputs

pytestmark = pytest.mark.asyncio


class SlowWorker:
    """The process of a checker, which accepts grammars once `go` is set."""

    def __init__(self, go: asyncio.Event) -> None:
        self.stdin = self.stdout = self
        self.asked: list[str] = []
        self._go = go

    def write(self, line: bytes) -> None:
        self.asked.append(json.loads(line)[1])

    async def drain(self) -> None: ...

    async def readline(self) -> bytes:
        await self._go.wait()
        return b"null"

    def kill(self) -> None: ...

    async def wait(self) -> int:
        return -9


class FakeChecker(GrammarChecker):
    def __init__(self, **options: Any) -> None:
        super().__init__(lambda: "", **options)
        self.go = asyncio.Event()
        self.workers: list[SlowWorker] = []

    async def _running(self) -> Any:
        if self._process is None:
            self.workers.append(SlowWorker(self.go))
            self._process = self.workers[-1]  # type: ignore[assignment]
        return self._process

    @property
    def asked(self) -> list[str]:
        return [text for worker in self.workers for text in worker.asked]

    @property
    def num_begun(self) -> int:
        return len(self.asked) + sum(map(len, self._turns._queues.values()))

    async def begin(self, pattern: str, client: str) -> "asyncio.Task[None]":
        """Start a check, and wait until it has begun or waits for its turn."""
        before = self.num_begun
        task = asyncio.create_task(self.check(StructuredOutputs(regex=pattern), client))
        while self.num_begun == before:
            await asyncio.sleep(0.001)
        return task


async def test_one_key_delays_another_by_one_check_at_most() -> None:
    checker = FakeChecker()
    hostile = [await checker.begin(f"slow{n}", "hostile") for n in range(5)]
    others = [await checker.begin(f"quick{n}", "other") for n in range(2)]
    last = await checker.begin("last", "third")
    checker.go.set()
    await asyncio.gather(*hostile, *others, last)
    assert checker.asked[:5] == ["slow0", "quick0", "last", "slow1", "quick1"]
    assert checker.asked[5:] == ["slow2", "slow3", "slow4"]


async def test_remembered_result_needs_no_turn() -> None:
    checker = FakeChecker()
    checker.go.set()
    await checker.check(StructuredOutputs(regex="known"), "other")
    checker.go.clear()
    slow = await checker.begin("slow", "hostile")
    await checker.check(StructuredOutputs(regex="known"), "other")
    assert not slow.done()
    checker.go.set()
    await slow


async def test_equal_constraints_are_checked_once() -> None:
    checker = FakeChecker()
    same = [await checker.begin("same", client) for client in "aabbc"]
    checker.go.set()
    await asyncio.gather(*same)
    assert checker.asked == ["same"]


@pytest.mark.parametrize("seconds", [0.0, REFUSAL_SECONDS - 1, REFUSAL_SECONDS + 1])
async def test_check_past_the_limit_is_remembered_for_a_while(seconds: float) -> None:
    now = [0.0]
    checker = FakeChecker(limit_seconds=0.01, clock=lambda: now[0])
    outputs = StructuredOutputs(regex="slow")
    with pytest.raises(SamplingRefused, match="longer"):
        await checker.check(outputs, "a")
    now[0] = seconds
    with pytest.raises(SamplingRefused, match="longer"):
        await checker.check(outputs, "b")
    assert len(checker.asked) == (1 if seconds < REFUSAL_SECONDS else 2)


@pytest.mark.parametrize("reason", ["invalid", None])
async def test_refusals_expire_and_accepted_constraints_do_not(reason: str | None) -> None:
    now = [0.0]
    results = Results(lambda: now[0])
    results.add(b"name", reason)
    assert b"name" in results and results.get(b"name") == reason
    now[0] = REFUSAL_SECONDS
    assert (b"name" in results) == (reason is None)


async def test_latest_results_are_remembered() -> None:
    results = Results(lambda: 0.0)
    results.add(b"used", None)
    for number in range(MAX_RESULTS + 1):
        results.add(str(number).encode(), "invalid")
        assert results.get(b"used") is None
    assert b"0" not in results and b"1" not in results and b"2" in results


async def test_waiting_checks_are_bounded_per_key_and_in_total() -> None:
    turns = FairTurns(TurnLimits(client_bytes=10, total_bytes=25))
    await turns.acquire("running", 100)
    waiting = [asyncio.create_task(turns.acquire(key, 10)) for key in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(ChecksQueueFull, match="of this API key") as of_client:
        await turns.acquire("a", 1)
    with pytest.raises(ChecksQueueFull) as of_all:
        await turns.acquire("c", 6)
    assert of_client.value.of_client and not of_all.value.of_client
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    admitted = asyncio.create_task(turns.acquire("c", 20))
    await asyncio.sleep(0)
    turns.release()
    await asyncio.wait_for(admitted, 5)


async def test_cancelled_caller_passes_its_turn_on() -> None:
    turns = FairTurns(TurnLimits(client_bytes=100, total_bytes=100))
    await turns.acquire("a", 1)
    first, second = (asyncio.create_task(turns.acquire("b", 1)) for _ in range(2))
    await asyncio.sleep(0)
    turns.release()  # begins the first turn, whose caller is cancelled before it runs
    first.cancel()
    await asyncio.wait_for(second, 5)
    with pytest.raises(asyncio.CancelledError):
        await first
    turns.release()
    await turns.acquire("c", 1)
