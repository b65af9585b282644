"""Benchmark: how much throughput it costs to export the prompt KV of every group.

Both arms, with and without exports, run on one engine with the connector configured, so they differ
only in the export of every group's prompt into an arena in shared memory. The model is the seedling
grown to 25 million parameters. Prompts are new in every run, so each is prefilled, and exported,
once.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from bench.harness.paired_runs import Pairs, alternate
from bench.harness.random_model import enlarged_seedling
from bench.harness.record import Record, Row, add_out
from engine.kv_types import ExportSlot, ExportStatus
from engine.settings import EngineSettings
from engine.types import Completion, SampleRequest, Sampling
from engine.vllm_engine import VllmEngine

GROUPS, SAMPLES, PROMPT_TOKENS, TOKENS = 4, 8, 1024, 128
GOAL = 0.97
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


async def measure(model: Path, rounds: int) -> tuple[Arms, int]:
    arms, numbers = Arms(), itertools.count()
    engine = VllmEngine(
        EngineSettings(
            model=str(model),
            seed=0,
            prompt_kv=True,
            max_sequences=GROUPS * SAMPLES,
            max_context_tokens=PROMPT_TOKENS + TOKENS,
        )
    )
    await engine.start("bench")
    with arena(engine.info.kv_bytes_per_token) as slots:

        async def exported() -> None:
            slots.clear()
            places: list[ExportSlot | None] = [slots.slot(group) for group in range(GROUPS)]
            arms.exported.append(await run(engine, next(numbers), places))
            assert slots.words() == [ExportStatus.COMMITTED] * GROUPS, "every prompt is exported"

        async def plain() -> None:
            arms.plain.append(await run(engine, next(numbers), [None] * GROUPS))

        try:
            await alternate([exported, plain], rounds=rounds)
        finally:
            await engine.stop()
    for values in (arms.exported, arms.plain):
        del values[0]  # the warm-up
    return arms, engine.info.kv_bytes_per_token


def record(arms: Arms, bytes_per_token: int, model: str) -> Record:
    ratio = Pairs(a=arms.exported, b=arms.plain).ratio()
    medians = [statistics.median(values) for values in (arms.exported, arms.plain)]
    return Record(
        name="kv_export_cost",
        claim=f"{GROUPS} groups of {SAMPLES}, prompts of {PROMPT_TOKENS} and responses of {TOKENS} "
        f"tokens, {model}: with an export of every prompt, and without.",
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
                what="exported per prompt",
                value=f"{bytes_per_token * (PROMPT_TOKENS - 1) / 2**20:,.1f} MiB",
            ),
        ],
        raw={"exported": arms.exported, "plain": arms.plain},
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
        measured = uvloop.run(measure(model, arguments.rounds))
        result = record(*measured, arguments.model.name if arguments.model else "25M parameters")
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
