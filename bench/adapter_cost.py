"""Benchmark: how much throughput LoRA adapters cost on a CPU.

Three arms (configurations): an engine without adapter support, one with support whose samples use
no adapter, and one whose samples all use one adapter.

Two engines differ only in `max_adapters`; runs alternate. The model is the seedling grown to 25
million parameters, the adapter covers every projection of every layer at rank 16.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path

import numpy as np
import uvloop
from safetensors.numpy import save_file

from bench.harness.paired_runs import Pairs, alternate
from bench.harness.random_model import enlarged_seedling
from bench.harness.record import Record, Row, add_out
from engine.settings import EngineSettings
from engine.types.samples import Completion, SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from engine.weights.checkpoint import read_base_checkpoint
from engine.weights.validation import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_TENSORS_FILE,
    LORA_SUFFIXES,
    PREFIX,
    TARGET_MODULES,
)

GROUPS, SAMPLES, PROMPT_TOKENS, TOKENS, RANK = 4, 8, 256, 64, 16
SAMPLING = Sampling(max_tokens=TOKENS, ignore_eos=True)
ARMS = ("no adapter", "loaded but unused", "in use")
NUMBERS = itertools.count()


def prompts(number: int) -> list[list[int]]:
    """Prompts that differ in each run, so that none of them hits the prefix cache."""
    tail = [5 + i % 60 for i in range(PROMPT_TOKENS - 2)]
    return [[5 + number % 60, 5 + number // 60 * GROUPS + group, *tail] for group in range(GROUPS)]


async def run(engine: VllmEngine, adapter: str | None) -> float:
    """Sample the groups of one run; returns sampled tokens per second."""
    number = next(NUMBERS)
    began = time.perf_counter()
    pending: list[Awaitable[Completion]] = []
    for group, prompt in enumerate(prompts(number)):
        samples = [
            SampleRequest(
                id=f"{number}-{group}-{i}",
                prompt_token_ids=prompt,
                sampling=SAMPLING,
                adapter=adapter,
            )
            for i in range(SAMPLES)
        ]
        pending += await engine.submit(samples)
    completions = await asyncio.gather(*pending)
    seconds = time.perf_counter() - began
    return sum(len(completion.token_ids) for completion in completions) / seconds


async def measure(model: Path, adapter: Path, rounds: int) -> dict[str, list[float]]:
    arms: dict[str, list[float]] = {name: [] for name in ARMS}
    without, within = (
        VllmEngine(
            EngineSettings(
                model=str(model),
                seed=0,
                max_adapters=places,
                max_adapter_rank=RANK,
                max_sequences=GROUPS * SAMPLES,
                max_context_tokens=PROMPT_TOKENS + TOKENS,
                cache_bytes=2**28,
            )
        )
        for places in (0, 2)
    )

    async def one(name: str, engine: VllmEngine, label: str | None) -> None:
        arms[name].append(await run(engine, label))

    try:
        await without.start("bench")
        await within.start("bench")
        await within.load_adapter("bench@1", adapter)
        await alternate(
            [
                lambda: one("no adapter", without, None),
                lambda: one("loaded but unused", within, None),
                lambda: one("in use", within, "bench@1"),
            ],
            rounds=rounds,
        )
    finally:
        await within.stop()
        await without.stop()
    return {name: values[1:] for name, values in arms.items()}


def record(arms: dict[str, list[float]]) -> Record:
    none, unnamed, named = (arms[name] for name in ARMS)
    rows = [
        Row(
            what=what,
            value=f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
        )
        for what, ratio in (
            (
                "throughput, adapter loaded but unused / no adapter loaded",
                Pairs(a=unnamed, b=none).ratio(),
            ),
            ("throughput, adapter in use / no adapter loaded", Pairs(a=named, b=none).ratio()),
        )
    ]
    medians = ", ".join(f"{name} {statistics.median(arms[name]):,.0f}" for name in ARMS)
    return Record(
        name="adapter_cost",
        claim=f"{GROUPS} groups of {SAMPLES}, prompts of {PROMPT_TOKENS} and responses of {TOKENS} "
        f"tokens, 25M parameters in bfloat16: the cost of LoRA adapters of rank {RANK} on every "
        "projection, on a CPU.",
        rows=[*rows, Row(what="throughput", value=f"{medians} tokens/s")],
        raw=dict(arms),
    )


def saved(model: Path, folder: Path) -> Path:
    """Write a random LoRA adapter for every projection of the model."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    tensors = {
        PREFIX + module + side: draw.normal(scale=0.02, size=shape).astype(np.float32)
        for module, (out, inner) in _projections(model)
        for side, shape in zip(LORA_SUFFIXES, ((RANK, inner), (out, RANK)), strict=True)
    }
    save_file(tensors, folder / ADAPTER_TENSORS_FILE)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear"}
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config))
    return folder


def _projections(model: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, tensor in read_base_checkpoint(model).tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGET_MODULES:
            yield module, tensor.shape


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
        adapter = saved(model, Path(folder) / "adapter")
        result = record(uvloop.run(measure(model, adapter, arguments.rounds)))
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
