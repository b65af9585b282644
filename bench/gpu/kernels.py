"""Decode attention of one layer: vLLM's and with shared prefixes, by block size, heads and shape.

    python -m bench.gpu.kernels --results FILE [--crossover DIRECTORY] [--rehearse]

Both are replayed from CUDA graphs, twice: the KV cache that a call reads is in the GPU's L2 cache
as far as it fits, or is replaced there by other bytes before each call, as by the weights between
two layers. The launches of attention with shared prefixes are timed as well.

With `--crossover` the costs that mode `auto` chooses by are measured as well, and stored where an
engine with this cache directory finds them. On a CPU the arms run with a reference implementation
of FlashAttention and nothing is stored.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch

from bench.gpu.attention_cases import SHARED, Batch, Step, Variant, variants
from bench.gpu.jobs import write_json
from engine.attention import crossover, cuda_calibration, cuda_timing
from engine.attention.cuda_calibration import LayerGeometry
from engine.attention.cuda_timing import Timer

PEAK_BYTES_PER_SECOND: Final = 3.35e12
NOT_ON_CPU: Final = "FlashAttention and CUDA graphs: not on a CPU; times of a reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timers:
    """Timers of a call from a graph, with and without the L2 cache flushed, and of its launches."""

    flushed: Timer
    warm: Timer
    launches: Timer


def arms(step: Step, batch: Batch, timers: Timers) -> Iterator[tuple[str, bool, list[float]]]:
    """Names of the arms, whether the cache is flushed, and the seconds of a call."""
    kinds = {"stock": step.stock_call()}
    if batch.rows > 1:
        kinds["shared"] = step.shared_call()
        yield "shared, launches", False, timers.launches(kinds["shared"])
    for name, call in kinds.items():
        yield name, False, timers.warm(call)
        yield name, True, timers.flushed(call)


def measure(variant: Variant, step: Step, timers: Timers) -> Iterator[dict[str, Any]]:
    for name, is_flushed, seconds in arms(step, variant.batch, timers):
        moved = step.read_bytes() if name == "stock" else step.distinct_bytes()
        yield {
            "batch": variant.batch.name,
            "heads": list(variant.heads),
            "block_size": variant.block_size,
            "layout": variant.layout,
            "num_splits": variant.num_splits,
            "arm": name,
            "flushed": is_flushed,
            "us": [each * 1e6 for each in seconds],
            "share_of_peak": moved / min(seconds) / PEAK_BYTES_PER_SECOND,
        }


def wall_times(call: Callable[[], object]) -> list[float]:
    began = time.perf_counter()
    call()
    return [time.perf_counter() - began]


def on_device() -> tuple[Any, Timers]:
    """FlashAttention and the timers of a GPU."""
    from vllm.v1.attention.backends import fa_utils

    return fa_utils, Timers(
        flushed=cuda_timing.graph_times,
        warm=lambda call: cuda_timing.replay_times([call]),
        launches=cuda_timing.launch_times,
    )


def reference() -> tuple[Any, Timers]:
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
    return flash, Timers(flushed=wall_times, warm=wall_times, launches=wall_times)


def rehearsed(variant: Variant) -> Variant:
    """The variant with a batch and heads that a CPU takes milliseconds for."""
    groups, rows = min(2, variant.batch.groups), min(2, variant.batch.rows)
    batch = Batch(groups=groups, rows=rows, prefix=128, suffix=16)
    return replace(variant, batch=batch, heads=(variant.heads[0] // 8, 2))


def store_crossover(directory: Path, geometry: LayerGeometry) -> dict[str, Any]:
    """Measure the crossover of a geometry, for the engines of this run."""
    key, trials = geometry.cache_key(), partial(cuda_calibration.measure_trials, geometry)
    costs = crossover.crossover(directory, key, trials)
    return asdict(costs) | {"stored": any(directory.glob("*.json"))}


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
