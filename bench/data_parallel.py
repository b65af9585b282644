"""Benchmark: throughput of two engines in one service against one engine with all threads, on CPU.

Both arms (configurations) have as many compute threads as the machine has processors. One engine
computes larger batches with all threads, two engines each compute half of the groups with half of
the threads. A single group runs on one engine only. Nothing is drafted, because several engines do
not draft. The model is the bundled one, enlarged to 25 million parameters.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import uvloop

from bench.harness.paired_runs import Pairs, alternate
from bench.harness.random_model import enlarged_seedling
from bench.harness.record import Record, Row, add_out
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from engine.types.samples import Completion, SampleRequest, Sampling
from engine.vllm_engine import VllmEngine

GROUPS, SAMPLES, PROMPT_TOKENS, TOKENS = 8, 8, 256, 96
SAMPLING = Sampling(max_tokens=TOKENS, ignore_eos=True)
ONE, TWO = "one engine", "two engines"
NUMBERS = itertools.count()


def prompts(number: int, groups: int) -> list[list[int]]:
    """Prompts that differ in each run, so that none of them hits the prefix cache."""
    tail = [5 + i % 60 for i in range(PROMPT_TOKENS - 2)]
    return [[5 + number % 60, 5 + number // 60 * groups + group, *tail] for group in range(groups)]


async def run(engine: VllmEngine, groups: int) -> float:
    """Sample the groups of one run; returns sampled tokens per second."""
    number = next(NUMBERS)
    began = time.perf_counter()
    pending: list[Awaitable[Completion]] = []
    for group, prompt in enumerate(prompts(number, groups)):
        name = f"{number}-{group}"
        pending += await engine.submit(
            [
                SampleRequest(
                    id=f"{name}-{i}", prompt_token_ids=prompt, sampling=SAMPLING, group=name
                )
                for i in range(SAMPLES)
            ]
        )
    completions = await asyncio.gather(*pending)
    seconds = time.perf_counter() - began
    return sum(len(completion.token_ids) for completion in completions) / seconds


def engine_of(model: Path, num_engines: int, num_threads: int) -> VllmEngine:
    return VllmEngine(
        EngineSettings(
            model=str(model),
            seed=0,
            data_parallel_size=num_engines,
            cpu_threads=num_threads // num_engines,
            max_sequences=GROUPS * SAMPLES,
            max_context_tokens=PROMPT_TOKENS + TOKENS,
            cache_bytes=2**28,
        ),
        speculation=SpeculationSettings(mode="off"),
    )


async def measure(model: Path, rounds: int, num_threads: int) -> dict[str, list[float]]:
    """Tokens per second of both arms, with all groups and with a single one."""
    arms: dict[str, list[float]] = {}
    one, two = (engine_of(model, number, num_threads) for number in (1, 2))

    async def measured(name: str, engine: VllmEngine, groups: int) -> None:
        arms.setdefault(f"{name}, {groups}", []).append(await run(engine, groups))

    try:
        await one.start("bench")
        await two.start("bench")
        for groups in (GROUPS, 1):
            await alternate(
                [partial(measured, ONE, one, groups), partial(measured, TWO, two, groups)],
                rounds=rounds,
            )
    finally:
        await two.stop()
        await one.stop()
    return {name: values[1:] for name, values in arms.items()}


def record(arms: dict[str, list[float]], num_threads: int) -> Record:
    rows = []
    for groups in (GROUPS, 1):
        one, two = arms[f"{ONE}, {groups}"], arms[f"{TWO}, {groups}"]
        ratio = Pairs(a=two, b=one).ratio()
        medians = f"{statistics.median(two):,.0f} / {statistics.median(one):,.0f} tokens/s"
        rows.append(
            Row(
                what=f"throughput, {groups} x {SAMPLES} samples, two engines / one engine",
                value=f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] ({medians})",
            )
        )
    return Record(
        name="data_parallel",
        claim=f"Groups of {SAMPLES}, prompts of {PROMPT_TOKENS} and responses of {TOKENS} tokens, "
        f"25M parameters: two engines with {num_threads // 2} compute threads each against one "
        f"engine with {num_threads}, on a CPU.",
        rows=rows,
        raw=dict(arms),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, help="default: the bundled model, enlarged to 25M parameters"
    )
    parser.add_argument("--rounds", type=int, default=9)
    add_out(parser)
    arguments = parser.parse_args()
    num_threads = len(os.sched_getaffinity(0)) // 2 * 2
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or enlarged_seedling(Path(folder))
        result = record(uvloop.run(measure(model, arguments.rounds, num_threads)), num_threads)
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
