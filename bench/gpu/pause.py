"""Pause of a publication at the size of 8B parameters, while samples run.

    python -m bench.gpu.pause --models DIRECTORY --results FILE [--rehearse]

Three activations read files, of which the first one allocates the pinned memory, and two open the
tensors of another process by CUDA IPC. Seconds of each part are appended to FILE, one line of JSON
per activation. The files are not checked before, as the service does outside of the pause.
"""

import argparse
import asyncio
import base64
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from math import fsum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

from bench.gpu import timers
from bench.gpu.arm import MEMORY_SHARE, Results, read_timers
from bench.gpu.engine_run import Run, rehearsal_settings
from bench.gpu.models import ON_GPU as MODELS_ON_GPU
from bench.gpu.models import REHEARSAL as REHEARSAL_MODELS
from bench.gpu.workloads import Workload
from engine.settings import EngineSettings
from engine.vllm_engine import VllmEngine
from engine.weights.ipc_tensors import IpcTensor

NUM_TRANSFERS: Final = 2
RUNNING: Final = Workload(groups=64, samples=1, prompt=128, tokens=96)
REHEARSED: Final = Workload(groups=2, samples=1, prompt=32, tokens=256)
FIRST_TOKENS_SECONDS: Final = 1.0
Steps = Sequence[tuple[str, Callable[[], Awaitable[object]]]]


def settings_of(model: Path, *, rehearse: bool) -> EngineSettings:
    if rehearse:
        return rehearsal_settings(model)
    return EngineSettings(
        model=str(model),
        seed=0,
        eager=True,
        max_context_tokens=2048,
        max_sequences=256,
        cache_bytes=2**33,
        gpu_memory_utilization=MEMORY_SHARE,
        weight_transfer="ipc",
    )


async def activate(
    run: Run, workload: Workload, results: Results, kind: str, *, before: Steps, paused: Steps
) -> None:
    """Run the steps of an activation; `before` is outside of the pause, in which samples run."""
    seconds = await timed(before)
    running = await run.submit(workload, range(workload.samples))
    await asyncio.sleep(FIRST_TOKENS_SECONDS)
    in_pause = await timed(paused)
    completions = await asyncio.gather(*running)
    versions = sorted({span.version for each in completions for span in each.versions})
    sums = await asyncio.to_thread(read_timers, time.monotonic())
    results.add(
        kind=kind,
        pause=fsum(in_pause.values()),
        seconds=seconds | in_pause,
        versions=versions,
        timers_after=sums,
    )


async def timed(steps: Steps) -> dict[str, float]:
    seconds = {}
    for name, step in steps:
        began = time.perf_counter()
        await step()
        seconds[name] = time.perf_counter() - began
    return seconds


def steps_of_pause(engine: VllmEngine, load: Callable[[], Awaitable[object]]) -> Steps:
    return (
        ("pause", lambda: engine.pause("keep")),
        ("load", load),
        ("reset", engine.reset_prefix_cache),
        ("resume", engine.resume),
    )


async def from_files(engine: VllmEngine, run: Run, paths: Sequence[Path], **options: Any) -> None:
    for path in paths:
        await activate(
            run,
            kind="files",
            before=(),
            paused=steps_of_pause(engine, lambda p=path: engine.update_weights(p, p.name)),  # type: ignore[misc]
            **options,
        )


async def from_gpu(engine: VllmEngine, run: Run, trainer: Connection, **options: Any) -> None:
    """Activations of tensors that another process has in the memory of the same GPU."""
    for number in range(NUM_TRANSFERS):
        trainer.send(True)
        tensors = await asyncio.to_thread(trainer.recv)
        version = f"ipc{number}"
        await activate(
            run,
            kind="ipc",
            before=(("open", lambda t=tensors: engine.open_transfer(t)),),  # type: ignore[misc]
            paused=steps_of_pause(engine, lambda v=version: engine.transfer_weights(v)),  # type: ignore[misc]
            **options,
        )
        trainer.send(None)


def start_trainer(model: Path) -> Connection:
    """A process with a model in GPU memory, which it hands over at each message."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=hand_over, args=(model, there), daemon=True).start()
    there.close()
    return here


def hand_over(model: Path, connection: Connection) -> None:
    """Hand the weights over at each message, and keep them until the next one."""
    from safetensors.torch import load_file

    from coppice import GpuWeights

    state = load_file(model / "model.safetensors", device="cuda")
    while connection.recv():
        with GpuWeights(state) as weights:
            connection.send([_received(tensor.model_dump()) for tensor in weights.tensors])
            connection.recv()


def _received(tensor: dict[str, Any]) -> IpcTensor:
    """The tensor as the service passes it on."""
    for handle in tensor["handles"].values():
        handle["handle"] = base64.b64decode(handle["handle"])
    return IpcTensor.from_dict(tensor)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    names = REHEARSAL_MODELS if given.rehearse else MODELS_ON_GPU
    paths = [given.models / version for version in names.versions()]
    timers.install()
    settings = settings_of(paths[0], rehearse=given.rehearse)
    trainer = start_trainer(paths[0]) if torch.cuda.is_available() else None
    engine = VllmEngine(settings, worker_extension=timers.WORKER)
    results = Results(given.results)
    options: dict[str, Any] = {
        "workload": REHEARSED if given.rehearse else RUNNING,
        "results": results,
    }
    try:
        await engine.start("v0")
        num_bytes = (paths[0] / "model.safetensors").stat().st_size
        results.add(kind="start", bytes=num_bytes, blocks=engine.info.num_blocks)
        run = Run(engine, json.loads((paths[0] / "config.json").read_text())["vocab_size"])
        await from_files(engine, run, [*paths[1:], paths[0]], **options)
        if trainer is not None:
            await from_gpu(engine, run, trainer, **options)
        else:
            results.add(kind="not possible", reason="CUDA IPC: not on a CPU")
    finally:
        with suppress(Exception):  # the results are written
            await engine.stop()


if __name__ == "__main__":
    asyncio.run(main())
