"""Benchmark: time from SIGTERM to the exit of a replica under load, with and without hand-over.

Two replicas with a Redis. A caller gets 64 seeded samples of 2,000 tokens from one replica, which
gets SIGTERM at a random time, while the other one runs 16 further samples. With hand-over the other
replica continues the samples. Without it the replica runs them to their end.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from bench.harness.record import Record, Row, add_out
from bench.harness.replica_processes import Replica, replicas
from coppice import AsyncRollouts, Retry, RolloutResult
from coppice.client import DEFAULT_RETRY
from coppice.rollout_options import RolloutOptions
from engine.settings import EngineSettings
from tests.redis_server import redis_server

NUM_SAMPLES, NUM_TOKENS, NUM_OTHERS = 64, 2000, 16
PROMPT = list(range(5, 37))
OPTIONS = RolloutOptions(n=NUM_SAMPLES, max_tokens=NUM_TOKENS, seed=11, ignore_eos=True)
DRAIN_SECONDS = 200
MIN_TOKENS, MAX_TOKENS = 100, 1200
"""Tokens per sample that are generated before the signal."""
GOAL_SECONDS = 2.0


@dataclass(slots=True)
class Runs:
    """Seconds of the drains, and the tokens per sample that were generated before each."""

    seconds: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)


async def sampled(
    replica: Replica, options: RolloutOptions, retry: Retry = DEFAULT_RETRY
) -> RolloutResult:
    async with AsyncRollouts(replica.url, timeout=600, retry=retry) as rollouts:
        return await rollouts.rollout([PROMPT], **options)


@asynccontextmanager
async def load(replica: Replica) -> AsyncIterator[None]:
    """Context manager in which a replica runs further samples, which end with it."""
    options = RolloutOptions(n=NUM_OTHERS, max_tokens=NUM_TOKENS, ignore_eos=True)

    async def repeat() -> None:
        while True:
            await sampled(replica, options, Retry.none())

    repeating = asyncio.create_task(repeat())
    try:
        yield
    finally:
        repeating.cancel()
        await asyncio.gather(repeating, return_exceptions=True)


async def drained(replica: Replica, num_tokens: int) -> float:
    """Seconds of a drain after `num_tokens` tokens per sample; all samples must be returned."""
    until = await replica.num_tokens() + NUM_SAMPLES * num_tokens
    running = asyncio.create_task(sampled(replica, OPTIONS))
    while await replica.num_tokens() < until:
        assert not running.done(), "the samples ended before the drain"
        await asyncio.sleep(0.1)
    seconds = await replica.drain()
    lengths = [len(sample.token_ids) for sample in (await running).groups[0].samples]
    assert lengths == [NUM_TOKENS] * NUM_SAMPLES, lengths
    return seconds


async def measure(redis_url: str, options: dict[str, object], drains: int) -> Runs:
    runs, random_numbers = Runs(), random.Random(3)
    async with replicas(redis_url, options) as both:
        for index in range(drains):
            replica, other = both[index % 2], both[1 - index % 2]
            num_tokens = random_numbers.randint(MIN_TOKENS, MAX_TOKENS)
            async with load(other):
                seconds = await drained(replica, num_tokens)
            runs.seconds.append(seconds)
            runs.num_tokens.append(num_tokens)
            print(f"after {num_tokens} tokens: {seconds:.2f} s", flush=True)
            if index + 1 < drains:
                await replica.start()
                await asyncio.sleep(1)  # a heartbeat of each, so that they see each other
    return runs


def record(moved: Runs, waited: Runs) -> Record:
    median = statistics.median(moved.seconds)
    return Record(
        name="drain",
        claim=f"SIGTERM to the exit of one of two replicas with {NUM_SAMPLES} running samples of "
        f"{NUM_TOKENS:,} tokens, of which {MIN_TOKENS} to {MAX_TOKENS:,} are generated, while the "
        f"other one runs {NUM_OTHERS} samples.",
        rows=[
            Row(
                what=f"samples move to the other replica, {len(moved.seconds)} drains",
                value=f"median {median:.2f} s, longest {max(moved.seconds):.2f} s",
                goal=f"median below {GOAL_SECONDS:.0f} s",
                verdict="met" if median < GOAL_SECONDS else "not met",
            ),
            Row(
                what=f"samples run to their end, {len(waited.seconds)} drain(s)",
                value=f"median {statistics.median(waited.seconds):.2f} s, "
                f"longest {max(waited.seconds):.2f} s",
            ),
        ],
        raw={
            "moved_seconds": moved.seconds,
            "moved_after_tokens": moved.num_tokens,
            "waited_seconds": waited.seconds,
            "waited_after_tokens": waited.num_tokens,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=EngineSettings().model)
    parser.add_argument("--drains", type=int, default=5)
    add_out(parser)
    arguments = parser.parse_args()
    options: dict[str, object] = {
        "--engine.model": arguments.model,
        "--engine.max-sequences": 2 * NUM_SAMPLES,
        "--server.drain-seconds": DRAIN_SECONDS,
    }
    without = {**options, "--cluster.handoff-seconds": 0}
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as redis:
        moved = uvloop.run(measure(redis.url, options, arguments.drains))
        waited = uvloop.run(measure(redis.url, without, 1))
    result = record(moved, waited)
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
