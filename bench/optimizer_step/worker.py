"""Measuring process of bench.trainer_step. Prints one JSON object per cell.

    python -m bench.optimizer_step.worker MACHINE time|handle ROUNDS CELL...
    python -m bench.optimizer_step.worker MACHINE peak ARM CELL

MACHINE is idle (two threads, wall-clock time), shared (one thread and its processor time, which
other work hardly affects) or gpu.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from bench.optimizer_step.arms import Arms
from bench.optimizer_step.cells import Cell
from coppice.train import Schedule

THREADS = {"idle": 2, "shared": 1, "gpu": 2}


# Rows per micro-batch to try; larger batches pay only for short rows.
MICRO_BATCHES = (1, 2)
LONGEST_MICRO_BATCH_TOKENS = 5000
GPU_MICRO_BATCHES = (1, 2, 4, 8)


def time_cell(arms: Arms, rounds: int) -> dict[str, object]:
    """Time training steps of one benchmark configuration, ours and the baselines in turn.

    Every second round is reversed.


    Naive rows have the same length and cost, so one micro-batch is timed and multiplied.
    """
    error = _distance(arms)
    micro_batch = _fastest_micro_batch(arms)
    times = arms.cell.num_samples // micro_batch
    steps: dict[str, tuple[Callable[[], None], int]] = {
        "ours": (arms.ours, 1),
        "naive": (partial(arms.naive_rows, micro_batch), times),
        "public": (arms.public, 1),
    }
    seconds = _alternate(arms, steps, rounds)
    return {"seconds": seconds, "micro_batch": micro_batch, "distance": error}


def time_prompt_kv(arms: Arms, rounds: int) -> dict[str, object]:
    """Time updates and passes without gradient, with given prompt KV and without."""
    prompt_kv = arms.prompt_kv()
    steps: dict[str, tuple[Callable[[], None], int]] = {
        "update": (arms.ours, 1),
        "update_given": (partial(arms.ours, prompt_kv=prompt_kv), 1),
        "logprobs": (arms.old_logprobs, 1),
        "logprobs_given": (partial(arms.old_logprobs, prompt_kv), 1),
    }
    for step, _ in steps.values():
        step()
    return {"seconds": _alternate(arms, steps, rounds)}


def peak_of(arms: Arms, arm: str) -> dict[str, object]:
    """Peak memory of a gradient computation, in MiB beyond the model and its gradients.

    The optimiser, the same for all arms, is excluded.
    """
    for parameter in arms.model.parameters():
        # Not zeros_like, whose pages are allocated lazily on the first write.
        parameter.grad = torch.empty_like(parameter).zero_()
    given = arms.prompt_kv() if arm == "given" else None
    ways: dict[str, Callable[[], None]] = {
        "naive": partial(_one_by_one, arms),
        "public": arms.public,
        "single": arms.single,
        "given": partial(arms.ours, prompt_kv=given),
    }
    ways |= {schedule: partial(arms.ours, schedule) for schedule in get_args(Schedule)}
    return {"mib": (_peak_on_gpu if arms.device.type == "cuda" else _peak_on_cpu)(ways[arm])}


def _one_by_one(arms: Arms) -> None:
    """Compute two rows in turn, the second with the gradients of the first, as in a whole step."""
    for _ in range(2):
        arms.naive_rows(1)


def _peak_on_cpu(step: Callable[[], None]) -> float:
    # Reset the high-water mark of the resident set.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_mib("VmRSS")
    step()
    return _status_mib("VmHWM") - before


def _peak_on_gpu(step: Callable[[], None]) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _alternate(
    arms: Arms, steps: dict[str, tuple[Callable[[], None], int]], rounds: int
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        names = list(steps) if number % 2 == 0 else list(reversed(steps))
        for name in names:
            step, times = steps[name]
            gradient, optimizer = arms.seconds(step)
            seconds[name].append(gradient * times + optimizer)
    return seconds


def _fastest_micro_batch(arms: Arms) -> int:
    row_tokens = arms.cell.prompt_tokens + arms.cell.response_tokens
    if arms.device.type == "cuda":
        sizes = list(GPU_MICRO_BATCHES)
    else:
        sizes = [n for n in MICRO_BATCHES if n * row_tokens <= LONGEST_MICRO_BATCH_TOKENS]
    if len(sizes) == 1:
        return sizes[0]

    def seconds_a_row(size: int) -> float:
        tries = [arms.seconds(partial(arms.naive_rows, size))[0] for _ in range(2)]
        return min(tries) / size

    return min(sizes, key=seconds_a_row)


def _distance(arms: Arms) -> float:
    """Relative L2 distance of PrefixGrouper's gradient from ours. Also warms up both."""
    ours, public = arms.gradient(arms.ours), arms.gradient(arms.public)
    return float((public - ours).norm() / ours.norm())


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith(name))
    return int(kib) / 1024


def main() -> None:
    machine, what, first, *cells = sys.argv[1:]
    torch.set_num_threads(THREADS[machine])
    device = torch.device("cuda" if machine == "gpu" else "cpu")
    clock = time.process_time if machine == "shared" else time.perf_counter
    for text in cells:
        arms = Arms(Cell.of(text), device, clock)
        if what == "peak":
            result = peak_of(arms, first)
        else:
            result = {"time": time_cell, "handle": time_prompt_kv}[what](arms, int(first))
        print(json.dumps({"cell": text} | result), flush=True)


if __name__ == "__main__":
    main()
