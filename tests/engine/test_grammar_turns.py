"""Checks of structured outputs take turns by API key. The worker's process is a fake."""

import asyncio
import json
from typing import Any

import pytest

from engine.errors import QueueFull, SamplingRefused
from engine.fair_limiter import LONG_SECONDS, SLOW_SECONDS, FairLimiter
from engine.requests.grammar_check import (
    CHECK_BYTES,
    CLIENT_BYTES,
    MAX_RESULTS,
    REFUSAL_SECONDS,
    GrammarChecker,
    Results,
)
from engine.requests.grammar_worker import Answer
from engine.types.samples import Sampling, StructuredOutputs

pytestmark = pytest.mark.asyncio


class FakeWorker:
    """The process of a checker, which answers once `go` is set. Checks of `heavy` take long."""

    has_ended = False

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked: list[str] = []
        self.reason: str | None = None

    async def ask(self, limit_seconds: float, line: str) -> Answer:
        pattern = json.loads(line)[1]
        self.asked.append(pattern)
        await self.go.wait()
        is_heavy = pattern.startswith("heavy")
        return Answer(self.reason, LONG_SECONDS + 1 if is_heavy else LONG_SECONDS)


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
        return len(self.asked) + self.limiter.num_waiting

    async def begin(self, pattern: str, client: str) -> "asyncio.Task[None]":
        """Start a check, and wait until it has begun or waits for its turn."""
        before = self.num_begun
        task = asyncio.create_task(self.check(constrained(pattern), client))
        while self.num_begun == before:
            await asyncio.sleep(0.001)
        return task

    async def make_slow(self, *clients: str) -> None:
        self.go.set()
        for client in clients:
            await self.check(constrained(f"heavy first of {client}"), client)
        self.go.clear()
        self.asked.clear()


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


@pytest.mark.parametrize("num_keys", [2, 4])
async def test_slow_keys_leave_a_place_to_the_others(num_keys: int) -> None:
    checker = FakeChecker()
    keys = [f"hostile{number}" for number in range(num_keys)]
    await checker.make_slow(*keys)
    hostile = [await checker.begin(f"heavy {key} {n}", key) for n in range(3) for key in keys]
    other = await checker.begin("quick", "other")
    assert checker.asked == ["heavy hostile0 0", "quick"]
    checker.go.set()
    await asyncio.gather(*hostile, other)


async def test_long_check_delays_checks_of_its_key_that_wait_already() -> None:
    checker = FakeChecker()
    tasks = [await checker.begin(f"heavy {key}{n}", key) for n in range(2) for key in "ab"]
    checker.go.set()
    checker.go.clear()
    while len(checker.asked) < 3 or checker.num_begun < 4:
        await asyncio.sleep(0.001)
    other = await checker.begin("quick", "other")
    assert checker.asked == ["heavy a0", "heavy b0", "heavy a1", "quick"]
    checker.go.set()
    await asyncio.gather(*tasks, other)


async def test_long_check_of_a_session_makes_its_key_slow() -> None:
    checker = FakeChecker()
    await checker.make_slow("a/session", "b")
    tasks = [await checker.begin("of a", "a/another"), await checker.begin("of b", "b")]
    assert checker.asked == ["of a"]
    checker.go.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("seconds", [SLOW_SECONDS - 1, SLOW_SECONDS + 1])
async def test_slow_keys_have_places_of_their_own_again_after_a_while(seconds: float) -> None:
    now = [0.0]
    checker = FakeChecker(clock=lambda: now[0])
    await checker.make_slow("a", "b")
    now[0] = seconds
    tasks = [await checker.begin(f"of {key}", key) for key in "ab"]
    assert len(checker.asked) == (1 if seconds < SLOW_SECONDS else 2)
    checker.go.set()
    await asyncio.gather(*tasks)


async def test_slow_keys_are_forgotten() -> None:
    now = [0.0]
    limiter = FairLimiter("work", 2, key_bytes=1, total_bytes=1, clock=lambda: now[0])
    for number in range(5000):
        now[0] += 1
        limiter.record(f"key{number}", LONG_SECONDS + 1)
        assert len(limiter._slow_until) <= SLOW_SECONDS


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


async def test_waiting_checks_of_a_key_are_bounded() -> None:
    checker = FakeChecker()
    large = "x" * (CLIENT_BYTES - CHECK_BYTES)
    task = await checker.begin(large, "a")
    with pytest.raises(QueueFull, match="structured outputs of this API key"):
        await checker.check(constrained("y"), "a")
    checker.go.set()
    await task
