"""Benchmark: time from weights in a trainer's memory to the first token that they sample.

The server is a process of its own, with a model of random weights: bfloat16 in the trainer, float32
in the engine. The arms alternate. The engine's load is the time that its worker reports. The limits
are measured in the same rounds with as many bytes: a copy in memory, and a bare socket over
loopback whose receiver keeps the bytes in memory. In two arms samples run during the publication,
and continue after it. LoRA adapters of rank 16 over every projection are published to a server of
their own, since support for adapters changes the engine; no sample is paused.

vLLM's server loads files that the trainer writes, with its `reload_weights`, or all tensors in
base64 in one JSON request, as SGLang's `update_weights_from_tensor` receives them. The tensors are
then in the format of safetensors, and base64 is coded with SIMD instructions. These requests are
measured after the other arms: they take gigabytes, and a machine that has returned them to its host
is slow to allocate memory in the next arm.

The goal is 1.3 times a transfer over the bare socket and one load, until the version is active. The
first token is not a part of it.

    python -m bench.weight_publish [--sizes 2m 25m 100m 600m] [--rounds 5]
"""

import argparse
import asyncio
import shutil
import socket
import statistics
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import asdict, fields
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from bench.adapter_cost import RANK, saved
from bench.harness.base64_weights import EXTENSION
from bench.harness.publications import (
    BASE64,
    RUNNING,
    AdapterPublisher,
    Publication,
    State,
    VllmPublisher,
    WeightsPublisher,
)
from bench.harness.random_model import write_model
from bench.harness.record import Record, Row, add_out
from bench.harness.server_process import coppice_server, vllm_server

SIZES = ("2m", "25m", "100m", "600m")
MODEL_OPTIONS = {
    "--engine.dtype": "float32",
    "--engine.cache-bytes": 2**28,
    "--engine.max-context-tokens": 512,
    "--weights.retain-superseded": 1,
}
CHANGED_SHARE = 0.05  # values that an optimizer step moves by one unit in the last place


def copy_seconds(num_bytes: int) -> float:
    """Time of a copy between pages that are mapped already."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    began = time.perf_counter()
    target[:] = source
    return time.perf_counter() - began


def socket_seconds(num_bytes: int) -> float:
    source, target = memoryview(bytearray(num_bytes)), memoryview(bytearray(num_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = threading.Thread(target=_receive, args=(listener, target))
        receiver.start()
        with socket.create_connection(listener.getsockname()) as connection:
            began = time.perf_counter()
            connection.sendall(source)
            connection.recv(1)
            seconds = time.perf_counter() - began
        receiver.join()
    return seconds


def _receive(listener: socket.socket, target: memoryview) -> None:
    connection, _ = listener.accept()
    with connection:
        received = 0
        while received < len(target):
            received += connection.recv_into(target[received:])
        connection.sendall(b".")


def step(state: State, seed: int) -> State:
    """Weights after a step that moves a share of the values by one unit in the last place."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in state.items():
        mask = torch.rand(tensor.shape, generator=generator) < CHANGED_SHARE
        moved[name] = (tensor.view(torch.int16) + mask.short()).view(tensor.dtype)
    return moved


async def measure(size: str, rounds: int, folder: Path) -> dict[str, object]:
    model = write_model(folder / size, size)
    state = load_file(model / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    options = {
        **MODEL_OPTIONS,
        "--engine.model": model,
        "--weights.directory": folder / "store",
        "--weights.source-directories": folder,
    }
    log, reloaded = folder / "log", shutil.copytree(model, folder / "vllm")
    async with coppice_server(options, log=log) as url, vllm_server(vllm_options(model)) as vllm:
        publisher = WeightsPublisher(url, log, folder, num_bytes)
        peer = VllmPublisher(vllm, reloaded, num_bytes)
        arms, limits = await asyncio.to_thread(_measure_all, publisher, peer, state, rounds)
    adapters = await measure_adapters(model, folder, rounds)
    for path in (model, reloaded):
        shutil.rmtree(path)
    return {
        "num_bytes": num_bytes,
        "arms": {arm: found for arm, found in arms.items() if arm not in RUNNING},
        "limits": limits,
        "running": {arm: arms[arm] for arm in RUNNING},
        "adapters": adapters,
    }


def vllm_options(model: Path) -> dict[str, object]:
    return {
        "--model": model,
        "--served-model-name": "model",
        "--dtype": "float32",
        "--kv-cache-memory-bytes": MODEL_OPTIONS["--engine.cache-bytes"],
        "--max-model-len": MODEL_OPTIONS["--engine.max-context-tokens"],
        "--worker-extension-cls": EXTENSION,
    }


async def measure_adapters(
    model: Path, folder: Path, rounds: int
) -> dict[str, list[dict[str, float]]]:
    options = {
        **MODEL_OPTIONS,
        "--engine.model": model,
        "--engine.max-adapters": 2,
        "--engine.max-adapter-rank": RANK,
        "--weights.directory": folder / "adapters",
        "--weights.source-directories": folder,
    }
    adapter = saved(model, folder / "adapter")
    async with coppice_server(options, log=folder / "log") as url:
        return await asyncio.to_thread(_publish_adapters, url, adapter, rounds)


def _publish_adapters(url: str, adapter: Path, rounds: int) -> dict[str, list[dict[str, float]]]:
    publisher = AdapterPublisher(url, adapter)
    measured: dict[str, list[dict[str, float]]] = {arm: [] for arm in publisher.arms}
    try:
        for number in range(rounds + 1):  # the first round warms up
            for arm, seconds in measured.items():
                found = asdict(publisher.publish(arm))
                if number:
                    seconds.append(found)
    finally:
        publisher.close()
    return measured


def _measure_all(
    publisher: WeightsPublisher, vllm: VllmPublisher, state: State, rounds: int
) -> tuple[dict[str, list[dict[str, float]]], dict[str, list[float]]]:
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    measured: dict[str, list[dict[str, float]]] = {arm: [] for arm in (*publisher.arms, *vllm.arms)}
    limits: dict[str, list[float]] = {"copy": [], "socket": []}
    states = [state, step(state, 1)]
    with closing(publisher), closing(vllm):
        for number in range(rounds + 1):  # the first round warms up
            new, previous = states[number % 2], states[1 - number % 2]
            for arm in (arm for arm in measured if arm != BASE64):
                if arm in vllm.arms:
                    each = vllm.publish(arm, new)
                else:
                    each = publisher.publish_next(arm, new, previous)
                measured[arm].append(_as_dict(each))
            limits["copy"].append(copy_seconds(num_bytes))
            limits["socket"].append(socket_seconds(num_bytes))
        for each_state in islice(cycle(states), rounds + 1) if BASE64 in measured else ():
            measured[BASE64].append(_as_dict(vllm.publish(BASE64, each_state)))
    return (
        {arm: found[1:] for arm, found in measured.items()},
        {name: seconds[1:] for name, seconds in limits.items()},
    )


def _as_dict(found: Publication) -> dict[str, float]:
    phases = {field.name: getattr(found, field.name) for field in fields(found)}
    return {"total": found.total, **phases}


def rows(size: str, raw: dict[str, object]) -> list[Row]:
    arms, limits = raw["arms"], raw["limits"]
    assert isinstance(arms, dict) and isinstance(limits, dict)
    label = _label(size, raw)

    def median(arm: str, phase: str) -> float:
        return _median(arms[arm], phase)

    found = [Row(what=f"{label}: {arm}", value=_phases(each)) for arm, each in arms.items()]
    copy, raw_socket = (statistics.median(limits[name]) for name in ("copy", "socket"))
    found.append(Row(what=f"{label}: memory copy", value=f"{copy:.3f} s"))
    found.append(Row(what=f"{label}: bare socket", value=f"{raw_socket:.3f} s"))
    load = median("HTTP", "load")
    ratio = (median("HTTP", "upload") + median("HTTP", "activate")) / (raw_socket + load)
    found.append(_ratio(f"{label}: HTTP / (bare socket + load)", ratio, 1.3))
    found.append(_ratio(f"{label}: HTTP, pause / load", median("HTTP", "paused") / load, 1.2))
    return found


def running_rows(size: str, raw: dict[str, object]) -> list[Row]:
    """Publications during which samples run, and their pauses against one without samples."""
    idle, running, label = raw["arms"], raw["running"], _label(size, raw)
    assert isinstance(idle, dict) and isinstance(running, dict)
    found = []
    for arm, each in running.items():
        value = f"{_phases(each)}, {_median(each, 'num_continued'):g} continued"
        found.append(Row(what=f"{label}: {arm}", value=value))
        ratio = _median(each, "paused") / _median(idle["HTTP"], "paused")
        found.append(Row(what=f"{label}: {arm}, pause / without samples", value=f"{ratio:.2f}"))
    return found


def adapter_rows(size: str, raw: dict[str, object]) -> list[Row]:
    arms, label = raw["adapters"], _label(size, raw)
    assert isinstance(arms, dict)
    found = []
    for arm, each in arms.items():
        load, first = _median(each, "load"), _median(each, "first_token")
        value = f"{load + first:.3f} s: load {load:.3f}, first token {first:.3f}"
        found.append(Row(what=f"{label}: {arm}", value=value))
    return found


def _label(size: str, raw: dict[str, object]) -> str:
    assert isinstance(raw["num_bytes"], int)
    return f"{size.upper()}, {raw['num_bytes'] / 1e6:,.0f} MB"


def _phases(found: list[dict[str, float]]) -> str:
    total, upload, paused, load, first = (
        _median(found, phase) for phase in ("total", "upload", "paused", "load", "first_token")
    )
    return (
        f"{total:.3f} s: upload {upload:.3f}, paused {paused:.3f} (load {load:.3f}), "
        f"first token {first:.3f}"
    )


def _median(found: list[dict[str, float]], phase: str) -> float:
    return float(statistics.median(each[phase] for each in found))


def _ratio(what: str, value: float, goal: float) -> Row:
    verdict = "met" if value <= goal else "not met"
    return Row(what=what, value=f"{value:.2f}", goal=f"at most {goal}", verdict=verdict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    add_out(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    raw: dict[str, object] = {}
    found: list[Row] = []
    for size in options.sizes:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            result = asyncio.run(measure(size, options.rounds, Path(folder)))
        raw[size] = result
        for rows_of in (rows, running_rows, adapter_rows):
            found += rows_of(size, result)
    record = Record(
        name="weight_publish",
        claim="Time from bfloat16 weights in a trainer's memory to the first token that a float32 "
        "engine on the same machine samples with them; the server's store is on tmpfs.",
        rows=found,
        raw=raw,
    )
    record.show()
    record.write(options.out)


if __name__ == "__main__":
    main()
