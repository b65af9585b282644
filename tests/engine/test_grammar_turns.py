"""Checks of structured outputs take turns by API key. The worker's process is a fake."""

import asyncio
import json
from typing import Any

import pytest

from engine.errors import ChecksQueueFull, SamplingRefused
from engine.io.fair_turns import LONG_SECONDS, SLOW_SECONDS, FairTurns, TurnLimits
from engine.io.grammar_check import MAX_RESULTS, REFUSAL_SECONDS, GrammarChecker, Results
from engine.types import Sampling, StructuredOutputs

pytestmark = pytest.mark.asyncio


class FakeWorker:
    """The process of a checker, which answers once `go` is set."""

    has_ended = False

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked: list[str] = []
        self.reason: str | None = None

    async def ask(self, limit_seconds: float, line: str) -> str | None:
        self.asked.append(json.loads(line)[1])
        await self.go.wait()
        return self.reason


class FakeChecker(GrammarChecker):
    def __init__(self, **options: Any) -> None:
        super().__init__(lambda: "", **options)
        self.worker = FakeWorker()
        self.go = self.worker.go
        self.asked = self.worker.asked

    async def _new_worker(self) -> Any:
        return self.worker

    @property
    def num_begun(self) -> int:
        return len(self.asked) + sum(map(len, self._turns._queues.values()))

    async def begin(self, pattern: str, client: str) -> "asyncio.Task[None]":
        """Start a check, and wait until it has begun or waits for its turn."""
        before = self.num_begun
        task = asyncio.create_task(self.check(constrained(pattern), client))
        while self.num_begun == before:
            await asyncio.sleep(0.001)
        return task


def constrained(pattern: str, **options: Any) -> Sampling:
    outputs = StructuredOutputs(regex=pattern)
    return Sampling(max_tokens=1, structured_outputs=outputs, **options)


async def test_one_key_delays_another_by_one_check_at_most() -> None:
    checker = FakeChecker()
    hostile = [await checker.begin(f"slow{n}", "hostile") for n in range(5)]
    others = [await checker.begin(f"quick{n}", "other") for n in range(2)]
    last = await checker.begin("last", "third")
    assert checker.asked == ["slow0", "quick0"]
    checker.go.set()
    await asyncio.gather(*hostile, *others, last)
    assert checker.asked[2:5] == ["last", "slow1", "quick1"]
    assert checker.asked[5:] == ["slow2", "slow3", "slow4"]


async def test_slow_keys_leave_a_turn_to_the_others() -> None:
    now = [0.0]
    turns = FairTurns(TurnLimits(client_bytes=100, total_bytes=100), lambda: now[0])
    for client in ("slow", "also slow"):
        await turns.acquire(client, 1)
    now[0] = LONG_SECONDS + 1
    for client in ("slow", "also slow"):
        turns.release(client)
    await turns.acquire("slow", 1)
    waiting = asyncio.create_task(turns.acquire("also slow", 1))
    for _ in range(3):
        await asyncio.wait_for(turns.acquire("other", 1), 5)
        turns.release("other")
    assert not waiting.done()
    turns.release("slow")
    await asyncio.wait_for(waiting, 5)
    now[0] += SLOW_SECONDS
    await asyncio.wait_for(turns.acquire("slow", 1), 5)


async def test_check_continues_without_its_caller() -> None:
    checker = FakeChecker()
    task = await checker.begin("shielded", "a")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    checker.go.set()
    await checker.check(constrained("shielded"), "a")
    assert checker.asked == ["shielded"]


async def test_constraint_that_was_too_slow_in_the_engine_is_refused() -> None:
    checker = FakeChecker()
    checker.go.set()
    await checker.check(constrained("slow"))
    checker.refuse(StructuredOutputs(regex="slow"))
    with pytest.raises(SamplingRefused, match="too long"):
        await checker.check(constrained("slow", logit_bias={1: 1.0}))


async def test_result_is_that_of_the_tokens_that_a_request_selects() -> None:
    checker = FakeChecker()
    checker.go.set()
    for options in ({}, {"logit_bias": {1: 1.0}}, {"allowed_token_ids": (1,)}):
        await checker.check(constrained("same", **options))
    assert checker.asked == ["same"] * 3


async def test_remembered_result_needs_no_turn() -> None:
    checker = FakeChecker()
    checker.go.set()
    await checker.check(constrained("known"), "other")
    checker.go.clear()
    slow = await checker.begin("slow", "hostile")
    await checker.check(constrained("known"), "other")
    assert not slow.done()
    checker.go.set()
    await slow


async def test_equal_constraints_are_checked_once() -> None:
    checker = FakeChecker()
    begun = await checker.begin("same", "a")
    same = [begun, *(asyncio.create_task(checker.check(constrained("same"), c)) for c in "abbc")]
    await asyncio.sleep(0)
    checker.go.set()
    await asyncio.gather(*same)
    assert checker.asked == ["same"]


@pytest.mark.parametrize("seconds", [0.0, REFUSAL_SECONDS - 1, REFUSAL_SECONDS + 1])
async def test_refusal_is_remembered_for_a_while(seconds: float) -> None:
    now = [0.0]
    checker = FakeChecker(clock=lambda: now[0])
    checker.worker.reason = "too slow"
    checker.go.set()
    with pytest.raises(SamplingRefused, match="too slow"):
        await checker.check(constrained("slow"), "a")
    now[0] = seconds
    with pytest.raises(SamplingRefused, match="too slow"):
        await checker.check(constrained("slow"), "b")
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
    for running in ("running", "also running"):
        await turns.acquire(running, 100)
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
    turns.release("running")
    await asyncio.wait_for(admitted, 5)


async def test_cancelled_caller_passes_its_turn_on() -> None:
    turns = FairTurns(TurnLimits(client_bytes=100, total_bytes=100))
    await turns.acquire("b", 1)
    first, second = (asyncio.create_task(turns.acquire("b", 1)) for _ in range(2))
    await asyncio.sleep(0)
    turns.release("b")  # begins the first turn, whose caller is cancelled before it runs
    first.cancel()
    await asyncio.wait_for(second, 5)
    with pytest.raises(asyncio.CancelledError):
        await first
    turns.release("b")
    await turns.acquire("c", 1)
