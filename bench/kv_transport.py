"""Benchmark: bandwidth of prompt KV to a local trainer, against prefilling the prompt again.

The server is a separate process whose engine only writes bytes, as many per token as Qwen3-8B has.
The sender of the bare socket arm is a separate process too, with the same bytes in the same chunks.
Every arm reads into existing memory, except NIXL, which is measured where it is installed: into
fresh memory, over the transport that UCX selects on one machine.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import torch
from transformers import AutoModelForCausalLM

from bench.harness.bare_sockets import bare_readers, bare_sender, read_once
from bench.harness.kv_load import (
    Latencies,
    handle_of,
    latencies,
    loopback_bytes_per_second,
    readers,
)
from bench.harness.kv_server import BYTES_PER_TOKEN, kv_server
from bench.harness.paired_runs import Pairs, alternate
from bench.harness.record import Record, Row, add_out
from coppice import KvHandle, KvSource, PromptKV
from coppice.prompt_kv.http_client import Download
from coppice.prompt_kv.nixl import installed
from engine.settings import EngineSettings

TOKENS = 1024
ARMS = (
    "bare socket",
    "HTTP",
    "HTTP, with checksums",
    "shared memory, with checksums",
    "first layer, HTTP",
)
NIXL = "NIXL, with checksums"

Arms = dict[str, Callable[[], Callable[[], None] | None]]

# Qwen3-8B: 2 FLOP per parameter and token, without attention, at 40 % of H200 dense bf16 peak.
H200_SECONDS_PER_TOKEN = 2 * 8.2e9 / (0.4 * 989e12)


class Reader:
    """Reads the KV of one handle by every transport, and records the seconds of each read."""

    def __init__(self, url: str, handle: KvHandle, port: int) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._handle = handle
        self._port = port
        self._http = KvSource(url, transports=["http"])
        self._shm = KvSource(url, transports=["shm"])
        self._nixl = KvSource(url, transports=["nixl"]) if installed() else None
        self._buffer = memoryview(bytearray(handle.num_bytes))

    def bare(self) -> None:
        read_once(self._port, self._buffer)

    def http(self) -> None:
        path = self._handle.locators[-1].url
        assert path is not None
        download = Download(self._http.endpoint, path, self._handle.num_bytes)
        download.readinto(self._buffer)
        download.close()

    def http_checked(self) -> None:
        assert PromptKV.fetch(self._handle, self._http, buffer=self._buffer) is not None

    def shm_checked(self) -> None:
        assert PromptKV.fetch(self._handle, self._shm) is not None

    def nixl_checked(self) -> None:
        assert self._nixl is not None
        assert PromptKV.fetch(self._handle, self._nixl) is not None, self._nixl.counts

    def first_layer(self) -> Callable[[], None]:
        """Read the KV of the first layer; returns a function that reads the rest, untimed."""
        kv = PromptKV.fetch(self._handle, self._http, buffer=self._buffer, wait=False)
        assert kv is not None
        kv.layer(0)
        return kv.wait

    async def run(self, rounds: int) -> None:
        ways = (self.bare, self.http, self.http_checked, self.shm_checked, self.first_layer)
        arms: Arms = dict(zip(ARMS, ways, strict=True))
        if self._nixl is not None:
            arms[NIXL] = self.nixl_checked
        self.seconds |= {arm: [] for arm in arms}
        await alternate([self._timed(*arm) for arm in arms.items()], rounds=rounds)
        for values in self.seconds.values():
            del values[0]  # the warm-up

    def _timed(
        self, arm: str, read: Callable[[], Callable[[], None] | None]
    ) -> Callable[[], Awaitable[None]]:
        async def timed() -> None:
            self._http.renew(self._handle.handle)
            began = time.perf_counter()
            rest = read()
            self.seconds[arm].append(time.perf_counter() - began)
            if rest is not None:
                rest()

        return timed


def forward_tokens_per_second(model_path: str) -> tuple[float, int]:
    """Speed of a model's PyTorch forward in tokens per second, and its KV bytes per token."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    config = model.config
    prompt = torch.randint(5, 64, (1, 256))
    seconds = []
    with torch.inference_mode():
        for _ in range(7):
            began = time.perf_counter()
            model(prompt)
            seconds.append(time.perf_counter() - began)
    num_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    return prompt.shape[1] / statistics.median(seconds), num_bytes


def transports(rounds: int) -> tuple[dict[str, list[float]], int]:
    with kv_server(nixl=installed()) as url:
        handle = handle_of(url, TOKENS)
        while installed() and not any(at.transport == "nixl" for at in handle.locators):
            time.sleep(0.1)  # its agent starts concurrently with the server
            handle = handle_of(url, TOKENS)
        with bare_sender(handle) as port:
            reader = Reader(url, handle, port)
            asyncio.run(reader.run(rounds))
    return reader.seconds, handle.num_bytes


def latency_beside_readers(num_rounds: int) -> list[Row]:
    """Request latency while four KV readers use at most a quarter of the loopback bandwidth.

    Four readers of bare sockets, at the same rate from a process of their own, show how much of it
    is due to the machine's processors.
    """
    rate = loopback_bytes_per_second() / 4
    with kv_server() as url:
        handle = handle_of(url, TOKENS // 2)
        latencies(url, 20)
        idle = latencies(url, num_rounds)
        with bare_sender(handle) as port, bare_readers(port, handle.num_bytes, 4, rate / 4):
            beside_sockets = latencies(url, num_rounds)
        handle = handle_of(url, TOKENS // 2)
        with readers(url, handle, 4, rate / 4):
            loaded = latencies(url, num_rounds)
    slower = loaded.p50_of_rollouts / idle.p50_of_rollouts
    return [
        Row(
            what=f"four readers at {rate / 1e9:.2f} GB/s: p99 of /readyz",
            value=f"{loaded.p99_of_probes:.1f} ms (idle {idle.p99_of_probes:.1f})",
            goal="< 20 ms",
            verdict="met" if loaded.p99_of_probes < 20 else "missed",
        ),
        Row(
            what="four readers: p50 latency of a small rollout, loaded / idle",
            value=compared(loaded, idle),
            goal="<= 1.3",
            verdict="met" if slower <= 1.3 else "missed",
        ),
        Row(
            what="four bare sockets instead, from another process: p50 of a small rollout",
            value=compared(beside_sockets, idle),
        ),
    ]


def compared(loaded: Latencies, idle: Latencies) -> str:
    slower = loaded.p50_of_rollouts / idle.p50_of_rollouts
    return f"{slower:.2f} ({loaded.p50_of_rollouts:.1f} ms, {idle.p50_of_rollouts:.1f} ms)"


def record(seconds: dict[str, list[float]], num_bytes: int, rows: list[Row], model: str) -> Record:
    per_second = {arm: num_bytes / statistics.median(values) for arm, values in seconds.items()}
    http = Pairs(a=seconds["bare socket"], b=seconds["HTTP"]).ratio()
    shm = Pairs(a=seconds["HTTP"], b=seconds["shared memory, with checksums"]).ratio()
    first, whole = (statistics.median(seconds[arm]) for arm in ("first layer, HTTP", "HTTP"))
    speed, small_bytes = forward_tokens_per_second(model)
    needed = BYTES_PER_TOKEN / H200_SECONDS_PER_TOKEN
    measured = [
        Row(
            what="bandwidth, HTTP / bare socket",
            value=f"{http.median:.2f} [{http.low:.2f}, {http.high:.2f}]",
            goal=">= 0.8",
            verdict=http.verdict(0.8),
        ),
        Row(
            what="time, HTTP / reading every byte through shared memory",
            value=f"{shm.median:.2f} [{shm.low:.2f}, {shm.high:.2f}]",
            goal=">= 2",
            verdict=shm.verdict(2.0),
        ),
        *(
            Row(what=arm, value=f"{per_second[arm] / 1e9:.2f} GB/s")
            for arm in seconds
            if not arm.startswith("first")
        ),
        Row(
            what="first layer usable over HTTP",
            value=f"{1000 * first:.1f} ms; all 36 after {1000 * whole:.1f} ms, without checksums",
        ),
        *_relative_to_http(seconds),
        *rows,
        *(_worth_row(arm, per_second[arm], speed, small_bytes, needed) for arm in ARMS[2:4]),
    ]
    return Record(
        name="kv_transport",
        claim=f"Prompt KV of {TOKENS} tokens, {num_bytes / 2**20:.0f} MiB, read into a process on "
        "the same machine.",
        rows=measured,
        raw=seconds,
    )


def _relative_to_http(seconds: dict[str, list[float]]) -> list[Row]:
    if NIXL not in seconds:
        return []
    ratio = Pairs(a=seconds["HTTP, with checksums"], b=seconds[NIXL]).ratio()
    return [
        Row(
            what="time, HTTP with checksums / NIXL with checksums",
            value=f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]",
        )
    ]


def _worth_row(arm: str, per_second: float, speed: float, small_bytes: int, needed: float) -> Row:
    """Table row: how many times faster a transport is than fetching needs to beat prefilling."""
    here = speed * small_bytes
    return Row(
        what=f"break-even against prefilling again, {arm}",
        value=f"{per_second / here:.1f} times what the shipped model's forward needs here "
        f"({here / 1e9:.3f} GB/s); {per_second / needed:.1f} times what Qwen3-8B needs on an H200 "
        f"({needed / 1e9:.1f} GB/s, computed, host memory only)",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    add_out(parser)
    parser.add_argument("--model", default=EngineSettings().model)
    arguments = parser.parse_args()
    seconds, length = transports(arguments.rounds)
    result = record(seconds, length, latency_beside_readers(100), arguments.model)
    result.show()
    print(f"\nwrote {result.write(arguments.out).name}")


if __name__ == "__main__":
    main()
