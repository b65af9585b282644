"""Benchmark: how much throughput it costs to export the prompt KV of every group, or of none.

Two arms, with and without exports, run on one engine with the connector configured, so they differ
only in the export of every group's prompt into an arena in shared memory. Two more arms request no
export, on an engine with the connector and on one without it: the cost of prompt KV for those who
do not use it. The model is the seedling grown to 25 million parameters. Prompts are new in every
run, so each is prefilled, and exported, once.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from bench.harness.paired_runs import Pairs, alternate
from bench.harness.random_model import enlarged_seedling
from bench.harness.record import Record, Row, add_out
from engine.settings import EngineSettings
from engine.types.kv import ExportSlot, ExportStatus
from engine.types.samples import Completion, SampleRequest, Sampling
from engine.vllm_engine import VllmEngine

GROUPS, SAMPLES, PROMPT_TOKENS, TOKENS = 4, 8, 1024, 128
GOAL = 0.97
UNUSED_GOAL = 0.99
GPU_SHARE = 0.4  # of each engine's, as two run at a time
WORD_BYTES = 64
SAMPLING = Sampling(max_tokens=TOKENS, ignore_eos=True)


@dataclass(slots=True)
class Arena:
    """File in shared memory that receives exports, with one slot per group for all runs."""

    path: Path
    slot_bytes: int

    def slot(self, group: int) -> ExportSlot:
        begin = group * self.slot_bytes
        return ExportSlot(
            arena=self.path,
            offset=begin + WORD_BYTES,
            status_offset=begin,
            num_tokens=PROMPT_TOKENS - 1,
        )

    def clear(self) -> None:
        with self.path.open("r+b") as file:
            for group in range(GROUPS):
                os.pwrite(file.fileno(), bytes(8), self.slot(group).status_offset)

    def words(self) -> list[int]:
        with self.path.open("rb") as file:
            places = [self.slot(group).status_offset for group in range(GROUPS)]
            stored = [os.pread(file.fileno(), 8, place) for place in places]
        return [int.from_bytes(status, "little") for status in stored]


@contextmanager
def arena(bytes_per_token: int) -> Iterator[Arena]:
    slot_bytes = WORD_BYTES + -(-bytes_per_token * PROMPT_TOKENS // WORD_BYTES) * WORD_BYTES
    descriptor, name = tempfile.mkstemp(dir="/dev/shm", prefix="coppice-bench-")
    try:
        os.posix_fallocate(descriptor, 0, slot_bytes * GROUPS)
        yield Arena(Path(name), slot_bytes)
    finally:
        os.close(descriptor)
        os.unlink(name)


@dataclass(slots=True)
class Arms:
    """Sampled tokens per second of each run, with exports and without."""

    exported: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)


def prompts(number: int) -> list[list[int]]:
    """Prompts that differ in each run, so that none of them hits the prefix cache."""
    tail = [5 + i % 60 for i in range(PROMPT_TOKENS - 2)]
    return [[5 + number % 60, 5 + number // 60 * GROUPS + group, *tail] for group in range(GROUPS)]


async def run(engine: VllmEngine, number: int, slots: list[ExportSlot | None]) -> float:
    """Sample the groups of one run; returns sampled tokens per second.

    The export of a group's prompt is requested with its first sample.
    """
    began = time.perf_counter()
    pending: list[Awaitable[Completion]] = []
    for group, prompt in enumerate(prompts(number)):
        samples = [
            SampleRequest(
                id=f"{number}-{group}-{i}",
                prompt_token_ids=prompt,
                sampling=SAMPLING,
                export=slots[group] if i == 0 else None,
            )
            for i in range(SAMPLES)
        ]
        pending += await engine.submit(samples)
    completions = await asyncio.gather(*pending)
    await engine.flush_exports()
    seconds = time.perf_counter() - began
    return sum(len(completion.token_ids) for completion in completions) / seconds


def create_engine(model: Path, *, prompt_kv: bool) -> VllmEngine:
    return VllmEngine(
        EngineSettings(
            model=str(model),
            seed=0,
            prompt_kv=prompt_kv,
            max_sequences=GROUPS * SAMPLES,
            max_context_tokens=PROMPT_TOKENS + TOKENS,
            gpu_memory_utilization=GPU_SHARE,
        )
    )


@asynccontextmanager
async def started(model: Path, *, prompt_kv: bool) -> AsyncIterator[VllmEngine]:
    engine = create_engine(model, prompt_kv=prompt_kv)
    try:
        await engine.start("bench")
        yield engine
    finally:
        await engine.stop()


async def measure_unused(model: Path, rounds: int) -> Pairs:
    """Tokens per second without exports, of engines with and without the connector."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    numbers = itertools.count()
    async with started(model, prompt_kv=True) as on, started(model, prompt_kv=False) as off:

        async def run_on() -> None:
            rates[True].append(await run(on, next(numbers), [None] * GROUPS))

        async def run_off() -> None:
            rates[False].append(await run(off, next(numbers), [None] * GROUPS))

        await alternate([run_on, run_off], rounds=rounds)
    return Pairs(a=rates[True][1:], b=rates[False][1:])  # without the warm-up


async def measure(model: Path, rounds: int) -> tuple[Arms, int]:
    arms, numbers = Arms(), itertools.count()
    async with started(model, prompt_kv=True) as engine:
        bytes_per_token = engine.info.kv_bytes_per_token
        await _measure_exports(engine, arms, numbers, rounds)
    for values in (arms.exported, arms.plain):
        del values[0]  # the warm-up
    return arms, bytes_per_token


async def _measure_exports(
    engine: VllmEngine, arms: Arms, numbers: Iterator[int], rounds: int
) -> None:
    with arena(engine.info.kv_bytes_per_token) as slots:

        async def exported() -> None:
            slots.clear()
            places: list[ExportSlot | None] = [slots.slot(group) for group in range(GROUPS)]
            arms.exported.append(await run(engine, next(numbers), places))
            assert slots.words() == [ExportStatus.COMMITTED] * GROUPS, "every prompt is exported"

        async def plain() -> None:
            arms.plain.append(await run(engine, next(numbers), [None] * GROUPS))

        await alternate([exported, plain], rounds=rounds)


def record(arms: Arms, bytes_per_token: int, unused: Pairs, model: str) -> Record:
    not_used = unused.ratio()
    ratio = Pairs(a=arms.exported, b=arms.plain).ratio()
    medians = [statistics.median(values) for values in (arms.exported, arms.plain)]
    return Record(
        name="kv_export_cost",
        claim=f"{GROUPS} groups of {SAMPLES}, prompts of {PROMPT_TOKENS} and responses of {TOKENS} "
        f"tokens, {model}: with an export of every prompt, and without. Then without exports: with "
        "engine.prompt_kv on, and off.",
        rows=[
            Row(
                what="throughput, with exports / without",
                value=f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
                goal=f">= {GOAL}",
                verdict=ratio.verdict(GOAL),
            ),
            Row(
                what="throughput",
                value=f"exported {medians[0]:,.1f}, not {medians[1]:,.1f} tokens/s",
            ),
            Row(
                what="throughput without exports, prompt KV on / off",
                value=f"{not_used.median:.3f} [{not_used.low:.3f}, {not_used.high:.3f}]",
                goal=f">= {UNUSED_GOAL}",
                verdict=not_used.verdict(UNUSED_GOAL),
            ),
            Row(
                what="exported per prompt",
                value=f"{bytes_per_token * (PROMPT_TOKENS - 1) / 2**20:,.1f} MiB",
            ),
        ],
        raw={
            "exported": arms.exported,
            "plain": arms.plain,
            "unused_on": list(unused.a),
            "unused_off": list(unused.b),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", type=Path, help="default: the seedling, enlarged to 25M parameters"
    )
    parser.add_argument("--rounds", type=int, default=9)
    add_out(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or enlarged_seedling(Path(folder))
        arms, bytes_per_token = uvloop.run(measure(model, arguments.rounds))
        unused = uvloop.run(measure_unused(model, arguments.rounds))
        name = arguments.model.name if arguments.model else "25M parameters"
        result = record(arms, bytes_per_token, unused, name)
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
