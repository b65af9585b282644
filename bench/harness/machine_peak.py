"""Measures the machine's peak FLOP/s and memory bandwidth, over all cores together."""

import ctypes
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.harness.record import Row

STEPS, NUM_REPEATS, NUM_FLOATS = 2_000_000, 20, 2**26
GEMMS = ((2048, 2048, 2048), (512, 4096, 4096), (4096, 64, 4096), (64, 4096, 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    flops_per_second: float
    """Measured with operands in registers."""
    bytes_per_second: float
    """Measured by reading memory far larger than the caches."""


def measure_peak(flags: list[str], *, num_threads: int) -> Peak:
    """Measure peak speeds with loops that are compiled with `flags` and run in all threads."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peak.so"
        source = Path(__file__).with_name("machine_peak.cpp")
        command = ["c++", "-O3", "-shared", "-fPIC", *flags, str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        loops = ctypes.CDLL(str(library))
        flops, read = loops.flops_per_second, loops.bytes_per_second
        flops.restype = read.restype = ctypes.c_double
        read.argtypes = [ctypes.c_void_p, ctypes.c_long]
        memory = [np.ones(NUM_FLOATS, np.float32) for _ in range(num_threads)]
        return Peak(
            flops_per_second=_best(lambda _: flops(STEPS), num_threads),
            bytes_per_second=_best(lambda i: read(memory[i].ctypes.data, NUM_FLOATS), num_threads),
        )


def _best(measure: Callable[[int], float], num_threads: int) -> float:
    """Highest total speed of all threads in several runs, since disturbances only slow down."""
    together = threading.Barrier(num_threads)

    def all_of(thread: int) -> list[float]:
        speeds = []
        for _ in range(NUM_REPEATS):
            together.wait()
            speeds.append(measure(thread))  # ctypes releases the GIL
        return speeds

    with ThreadPoolExecutor(num_threads) as threads:
        speeds = list(threads.map(all_of, range(num_threads)))
    return float(max(sum(at_once) for at_once in zip(*speeds, strict=True)))


def best_seconds(run: Callable[[], object], times: int = NUM_REPEATS) -> float:
    """Seconds of a function's fastest run among several."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def gemm_row() -> Row:
    """Table row: throughput of oneDNN's plain matrix products, for comparison.

    Without AVX-512 those in bfloat16 are a slow reference implementation.
    """
    dtype = torch.bfloat16 if torch.cpu.get_capabilities()["avx512_f"] else torch.float32
    speeds = [
        f"{gemm_flops(*shape, dtype) / 1e9:.0f} at {' x '.join(map(str, shape))}" for shape in GEMMS
    ]
    what = f"oneDNN {str(dtype).removeprefix('torch.')} matmul, for comparison"
    return Row(what=what, value=f"{', '.join(speeds)} GFLOP/s")


def gemm_flops(m: int, k: int, n: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
    out = torch.empty(m, n, dtype=dtype)
    return 2.0 * m * k * n / best_seconds(lambda: torch.mm(a, b, out=out))


def peak_rows(peak: Peak, instructions: str) -> list[Row]:
    return [
        Row(
            what="peak matmul throughput",
            value=f"{peak.flops_per_second / 1e9:.0f} GFLOP/s from registers, "
            f"{torch.get_num_threads()} threads, {instructions}",
        ),
        Row(what="peak memory bandwidth", value=f"{peak.bytes_per_second / 1e9:.1f} GB/s read"),
        gemm_row(),
    ]
