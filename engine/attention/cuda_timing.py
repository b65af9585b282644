"""Timing helpers for attention on a GPU: kernel time in CUDA graphs, and launch time."""

import time
from collections.abc import Callable
from functools import partial

import torch
from vllm.platforms import current_platform

REPEATS = 5
CALLS = 16
MIN_SECONDS = 1e-6
"""Lower limit of a time after the subtraction of another, less than any kernel takes."""
Timer = Callable[[Callable[[], object]], list[float]]
"""Times of a call in repeated rounds, in seconds."""


def graph_times(call: Callable[[], object]) -> list[float]:
    """Times of a call in a CUDA graph, which finds nothing in the GPU's L2 cache.

    Before each call twice the size of that cache is written. The time of the writes is measured
    and subtracted.
    """
    size = 2 * torch.cuda.get_device_properties().L2_cache_size
    flush = partial(
        torch.empty(size, dtype=torch.uint8, device=current_platform.device_type).fill_, 1
    )
    for each in (flush, call):
        each()  # compiles
    alone = min(replay_times([flush]))
    return [max(both - alone, MIN_SECONDS) for both in replay_times([flush, call])]


def replay_times(calls: list[Callable[[], object]]) -> list[float]:
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * CALLS:
            call()
    return [_seconds(graph.replay) / CALLS for _ in range(1 + REPEATS)][1:]


def launch_times(call: Callable[[], object]) -> list[float]:
    """Times to launch a call after the replay of a small graph, without waiting for the GPU."""
    call()
    cell, piece = torch.zeros(1, device=current_platform.device_type), torch.cuda.CUDAGraph()
    torch.accelerator.synchronize()
    with torch.cuda.graph(piece):
        cell.add_(1)
    times = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        for _ in range(CALLS):
            piece.replay()
            call()
        times.append((time.perf_counter() - began) / CALLS)
        torch.accelerator.synchronize()
    return times[1:]


def _seconds(run: Callable[[], object]) -> float:
    torch.accelerator.synchronize()
    began = time.perf_counter()
    run()
    torch.accelerator.synchronize()
    return time.perf_counter() - began
