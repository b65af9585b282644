"""Decode attention of one layer: vLLM's and with shared prefixes, by block size, heads and shape.

    python -m bench.gpu.kernels --results FILE [--crossover DIRECTORY] [--rehearse]

vLLM's attention is replayed from a CUDA graph; attention with shared prefixes is launched call by
call, and replayed from a graph as well. Each is measured twice: the KV cache that a call reads is
in the GPU's L2 cache as far as it fits, or is replaced there by other bytes before each call, as
the weights do between two layers. The time of the replacement alone is subtracted.

With `--crossover` the costs that mode `auto` chooses by are measured as well, and stored where an
engine with this cache directory finds them. On a CPU the arms run with a reference implementation
of FlashAttention and nothing is stored.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from bench.gpu.attention_cases import SHARED, Batch, Step, Variant, variants
from bench.gpu.jobs import write_json
from engine.attention import crossover, cuda_calibration
from engine.attention.cuda_calibration import LayerGeometry

PEAK_BYTES_PER_SECOND: Final = 3.35e12
FLUSH_BYTES: Final = 2**28 if torch.cuda.is_available() else 1
NOT_ON_CPU: Final = "FlashAttention and CUDA graphs: not on a CPU; times of a reference"

Calls = Sequence[Callable[[], None]]
Timer = Callable[[Calls], list[float]]


def arms(step: Step, batch: Batch) -> Iterator[tuple[str, Calls, bool]]:
    """Names and calls of the arms, and whether they are replayed from a graph."""
    yield "stock", step.stock_calls(), True
    if batch.rows > 1:
        yield "shared, launched", step.shared_calls(), False
        yield "shared", step.shared_calls(), True


def flushed(calls: Calls, other: torch.Tensor) -> Calls:
    def call_after(call: Callable[[], None]) -> None:
        other.fill_(0)
        call()

    return [partial(call_after, call) for call in calls]


def measure(variant: Variant, step: Step, timers: Mapping[bool, Timer]) -> Iterator[dict[str, Any]]:
    other = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=step.out.device)
    for name, calls, is_graph in arms(step, variant.batch):
        timer = timers[is_graph]
        alone = min(timer(flushed([nothing], other)))
        moved = step.read_bytes() if name == "stock" else step.distinct_bytes()
        for flush in (False, True):
            seconds = timer(flushed(calls, other) if flush else calls)
            seconds = [each - alone * flush for each in seconds]
            yield {
                "batch": variant.batch.name,
                "heads": list(variant.heads),
                "block_size": variant.block_size,
                "layout": variant.layout,
                "num_splits": variant.num_splits,
                "arm": name,
                "flushed": flush,
                "us": [each * 1e6 for each in seconds],
                "share_of_peak": moved / min(seconds) / PEAK_BYTES_PER_SECOND,
            }


def nothing() -> None:
    """A call without work."""


def wall_times(calls: Calls) -> list[float]:
    times = []
    for call in calls:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def on_device() -> tuple[Any, Mapping[bool, Timer]]:
    """FlashAttention, and the timers of calls that are replayed from a graph, and of others."""
    from vllm.v1.attention.backends import fa_utils

    return fa_utils, {True: cuda_calibration.graph_times, False: cuda_calibration.launched_times}


def reference() -> tuple[Any, Mapping[bool, Timer]]:
    """FlashAttention's functions on a CPU. The merge is replaced as well, in this process."""
    from kernels.shared_prefix_attention import cuda
    from tests.engine.attention.second_runner import merge
    from tests.kernels.flash_attention import flash_attn_varlen_func

    cuda.merge = merge
    flash = SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func,
        get_scheduler_metadata=lambda **_: None,
        get_flash_attn_version=lambda **_: 3,
    )
    return flash, {True: wall_times, False: wall_times}


def rehearsed(variant: Variant) -> Variant:
    """The variant with a batch and heads that a CPU takes milliseconds for."""
    groups, rows = min(2, variant.batch.groups), min(2, variant.batch.rows)
    batch = Batch(groups=groups, rows=rows, prefix=128, suffix=16)
    return replace(variant, batch=batch, heads=(variant.heads[0] // 8, 2))


def store_crossover(directory: Path, geometry: LayerGeometry) -> dict[str, Any]:
    """Measure the crossover of a geometry, for the engines of this run."""
    key, trials = geometry.cache_key(), partial(cuda_calibration.measure_trials, geometry)
    costs = crossover.crossover(directory, key, trials)
    return {"stock": costs.stock, "shared": costs.shared, "stored": any(directory.glob("*.json"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--crossover", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    flash, timers = on_device() if on_gpu else reference()
    found: dict[str, Any] = {"times": []} if on_gpu else {"not possible": NOT_ON_CPU, "times": []}
    if given.crossover and on_gpu:
        geometry = Step(Variant(batch=SHARED[2]), device, flash).geometry
        found["crossover"] = store_crossover(given.crossover, geometry)
    for variant in variants():
        chosen = rehearsed(variant) if given.rehearse else variant
        for times in measure(variant, Step(chosen, device, flash), timers):
            found["times"].append(times)
            write_json(given.results, found)
            print(times, flush=True)


if __name__ == "__main__":
    main()
