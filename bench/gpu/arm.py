"""An engine in one mode, which samples batches when it is told to.

    python -m bench.gpu.arm MODE --models DIRECTORY --cache DIRECTORY --results FILE [--rehearse]

It reads names of batches from its standard input and appends a line of JSON to FILE as soon as it
has started and after each batch. So engines that share a GPU take turns. The modes off, always and
auto are those of shared-prefix attention; siblings and drafter are those of speculation; host
serves a model of one layer, whose step is the time of the host.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.gpu import timers
from bench.gpu.engine_run import Run, rehearsal_settings
from bench.gpu.models import ON_GPU as MODELS_ON_GPU
from bench.gpu.models import REHEARSAL as REHEARSAL_MODELS
from bench.gpu.models import Models
from bench.gpu.workloads import BATCHES, ON_GPU, REHEARSAL, Workload
from engine.attention.settings import AttentionSettings
from engine.settings import EngineSettings
from engine.speculation.settings import SpeculationSettings
from engine.types.feature_stats import CudaGraphStats, SharedPrefixStats, SpeculationStats
from engine.vllm_engine import VllmEngine

GIGABYTES: Final[Mapping[str, float]] = {
    "off": 10,
    "always": 10,
    "auto": 10,
    "siblings": 2.5,
    "drafter": 2.5,
    "host": 0.5,
}
CONTEXT_TOKENS: Final = 4608
MEMORY_SHARE: Final = 0.05
"""Memory that has to be free at the start; the KV cache has a size of its own."""
DRAFT_TOKENS: Final = 4
COUNTER_SECONDS: Final = 2.5
"""Counters of the engine are those of its last heartbeat."""


def settings_of(mode: str, model: Path, *, rehearse: bool) -> EngineSettings:
    if rehearse:
        return rehearsal_settings(model)
    return EngineSettings(
        model=str(model),
        seed=0,
        max_context_tokens=CONTEXT_TOKENS,
        max_sequences=256,
        cache_bytes=int(GIGABYTES[mode] * 1e9),
        gpu_memory_utilization=MEMORY_SHARE,
    )


def engine_of(mode: str, models: Path, names: Models, cache: Path, *, rehearse: bool) -> VllmEngine:
    model = models / (names.drafter if mode == "host" else names.model)
    attention = mode if mode in ("off", "always", "auto") else "off"
    drafting = mode in ("siblings", "drafter")
    options: dict[str, Any] = {"allow_predicted_loss": True}
    if mode == "drafter":
        options |= {
            "longest_draft": DRAFT_TOKENS,
            "drafter": models / names.drafter,
            "drafter_training": False,
        }
    return VllmEngine(
        settings_of(mode, model, rehearse=rehearse).model_copy(
            update={"cache_directory": cache / mode}
        ),
        attention=AttentionSettings.model_validate({"shared_prefix": attention}),
        speculation=SpeculationSettings.model_validate(
            options | {"mode": mode if drafting else "off"}
        ),
        worker_extension=timers.WORKER,
    )


class Results:
    """File of an arm, with a line per batch. The first one has facts of the engine."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def add(self, **values: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(values) + "\n")


async def serve(engine: VllmEngine, workloads: Mapping[str, Workload], results: Results) -> None:
    """Start the engine, and run the batches that are named on the standard input, until it ends."""
    began = time.monotonic()
    await engine.start("v0")
    info = engine.info
    results.add(
        batch="start",
        seconds=time.monotonic() - began,
        blocks=info.num_blocks,
        block_size=info.block_size,
        features=[asdict(feature) for feature in info.features],
    )
    run = Run(engine, engine.llm.model_config.get_vocab_size())
    idle_since = time.monotonic()
    while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
        before = await asyncio.to_thread(read_timers, idle_since)
        results.add(batch=name, timers_before=before, **await run.batch(workloads[name]))
        idle_since = time.monotonic()
    after = await asyncio.to_thread(read_timers, idle_since)
    await asyncio.sleep(COUNTER_SECONDS)
    results.add(batch="end", timers_before=after, counters=counters(engine))


def read_timers(since: float) -> dict[str, dict[str, float]]:
    """Sums of all batches so far. The engine has been idle since the last one."""
    folder = os.environ.get(timers.VARIABLE)
    return timers.read_sums(Path(folder), since=since) if folder else {}


def counters(engine: VllmEngine) -> dict[str, Any]:
    """Counters since the start, without those that are zero."""
    graphs = asdict(engine.stats(CudaGraphStats))
    graphs["misses"] = {str(shape): count for shape, count in graphs["misses"].items()}
    return {
        "attention": _without_zeros(asdict(engine.stats(SharedPrefixStats))),
        "speculation": _without_zeros(asdict(engine.stats(SpeculationStats))),
        "graphs": _without_zeros(graphs),
    }


def _without_zeros(counted: Mapping[str, Any]) -> dict[str, Any]:
    inner = {
        name: _without_zeros(value) if isinstance(value, Mapping) else value
        for name, value in counted.items()
    }
    return {str(name): value for name, value in inner.items() if value}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=BATCHES)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    names = REHEARSAL_MODELS if given.rehearse else MODELS_ON_GPU
    workloads = REHEARSAL if given.rehearse else ON_GPU
    timers.install()
    engine = engine_of(given.mode, given.models, names, given.cache, rehearse=given.rehearse)
    try:
        await serve(engine, workloads, Results(given.results))
    finally:
        with suppress(Exception):  # the results are written
            await engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
