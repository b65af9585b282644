"""Benchmark: time of a batch on two replicas, with and without rebalancing of its long tail.

Each of 8 groups of 16 samples is one request. The groups have different lengths. A load balancer
that does not know the lengths gives half of the groups to each replica. In the first case all long
groups are on one replica, and its engine runs them all at the same time, or half of them. In the
others lengths and replicas are random.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.harness.record import Record, Row, add_out
from bench.harness.replica_processes import Replica, replicas
from coppice import AsyncRollouts
from coppice.rollout_options import RolloutOptions
from engine.settings import EngineSettings
from tests.redis_server import redis_server

NUM_GROUPS, GROUP_SIZE, PROMPT_TOKENS = 8, 16, 64
LONG, SHORT = 2000, 250
LENGTHS = (250, 250, 500, 1000, 2000)
"""Lengths of the groups of a random case, in tokens, with equal probabilities."""
GOAL = 1.2
WARM_UP = ((64,),) * 2
NUM_SEQUENCES = (NUM_GROUPS * GROUP_SIZE, 2 * GROUP_SIZE)
"""Samples that an engine runs at the same time; the others wait in its queue."""


@dataclass(frozen=True, slots=True)
class Case:
    """Lengths of the groups on each replica, in tokens, and sequences of each engine."""

    num_sequences: int
    lengths: tuple[tuple[int, ...], ...]


def cases(num_random: int) -> list[Case]:
    numbers, half = random.Random(5), NUM_GROUPS // 2
    skewed = [Case(number, ((LONG,) * half, (SHORT,) * half)) for number in NUM_SEQUENCES]
    drawn = [
        tuple(tuple(numbers.choice(LENGTHS) for _ in range(half)) for _ in range(2))
        for _ in range(num_random)
    ]
    return [*skewed, *(Case(NUM_SEQUENCES[-1], lengths) for lengths in drawn)]


async def batch_seconds(both: Sequence[Replica], lengths: tuple[tuple[int, ...], ...]) -> float:
    """Seconds from the first request to the last result of a batch."""
    numbers = random.Random(str(lengths))
    async with (
        AsyncRollouts(both[0].url, timeout=600) as first,
        AsyncRollouts(both[1].url, timeout=600) as second,
    ):
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for rollouts, own in zip((first, second), lengths, strict=True):
                for length in own:
                    prompt = [numbers.randrange(5, 200) for _ in range(PROMPT_TOKENS)]
                    tasks.create_task(_sample(rollouts, prompt, length))
        return time.perf_counter() - began


async def _sample(rollouts: AsyncRollouts, prompt: list[int], num_tokens: int) -> None:
    options = RolloutOptions(n=GROUP_SIZE, max_tokens=num_tokens, seed=7, ignore_eos=True)
    result = await rollouts.rollout([prompt], **options)
    lengths = {len(sample.token_ids) for sample in result.groups[0].samples}
    assert lengths == {num_tokens}, lengths


async def measure(redis_url: str, options: dict[str, object], all_cases: list[Case]) -> list[float]:
    """Seconds of each case; those with the same number of sequences run on the same replicas."""
    seconds = []
    for number in NUM_SEQUENCES:
        async with replicas(redis_url, {**options, "--engine.max-sequences": number}) as both:
            await batch_seconds(both, WARM_UP)
            for case in (case for case in all_cases if case.num_sequences == number):
                await asyncio.sleep(1)  # a heartbeat of each, so that both are idle
                seconds.append(await batch_seconds(both, case.lengths))
                print(f"{number} sequences, {case.lengths}: {seconds[-1]:.2f} s", flush=True)
    return seconds


def record(all_cases: list[Case], without: list[float], with_it: list[float]) -> Record:
    ratios = [a / b for a, b in zip(without, with_it, strict=True)]
    drawn = ratios[len(NUM_SEQUENCES) :]
    return Record(
        name="rebalance",
        claim=f"{NUM_GROUPS} groups of {GROUP_SIZE} samples on two replicas with one processor "
        f"each: time until all have ended, without / with `cluster.rebalance`.",
        rows=[
            *(
                Row(
                    what=f"four groups of {LONG:,} tokens on one replica, four of {SHORT} on the "
                    f"other, {number} sequences per replica",
                    value=f"{ratios[i]:.2f}: {without[i]:.1f} -> {with_it[i]:.1f} s",
                    goal=f">= {GOAL:.1f}",
                    verdict="met" if ratios[i] >= GOAL else "not met",
                )
                for i, number in enumerate(NUM_SEQUENCES)
            ),
            Row(
                what=f"random lengths of {min(LENGTHS)} to {max(LENGTHS):,} tokens, "
                f"{NUM_SEQUENCES[-1]} sequences per replica, {len(drawn)} batches",
                value=f"median {statistics.median(drawn):.2f}, "
                f"{min(drawn):.2f} to {max(drawn):.2f}",
            ),
        ],
        raw={
            "lengths": [case.lengths for case in all_cases],
            "without_seconds": without,
            "with_seconds": with_it,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=EngineSettings().model)
    parser.add_argument("--random-cases", type=int, default=5, help="at least 1")
    add_out(parser)
    arguments = parser.parse_args()
    options: dict[str, object] = {"--engine.model": arguments.model}
    all_cases = cases(max(1, arguments.random_cases))
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as redis:
        arms: tuple[dict[str, object], ...] = ({}, {"--cluster.rebalance": "true"})
        without, with_it = (
            uvloop.run(measure(redis.url, {**options, **arm}, all_cases)) for arm in arms
        )
    result = record(all_cases, without, with_it)
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
