"""Latencies of small requests, alone and next to prompt KV readers in separate processes."""

import math
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import PIPE, Popen
from typing import Any

import httpx

from bench.harness.kv_server import ROOT
from coppice import Kv, KvHandle, KvSource, PromptKV, Rollouts

SMALL = {"groups": [{"prompt": {"token_ids": [1, 2, 3]}, "n": 4}], "sampling": {"max_tokens": 16}}


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Latencies in milliseconds."""

    probes: list[float]
    rollouts: list[float]

    @property
    def p99_of_probes(self) -> float:
        return statistics.quantiles(self.probes, n=100)[98]

    @property
    def p50_of_rollouts(self) -> float:
        return statistics.median(self.rollouts)


def handle_of(url: str, num_tokens: int) -> KvHandle:
    with Rollouts(url) as rollouts:
        prompt = [1 + i % 200 for i in range(num_tokens + 1)]
        (group,) = rollouts.rollout([prompt], max_tokens=1, kv=Kv()).groups
    assert group.kv is not None, group.kv_reason
    return group.kv


def latencies(url: str, num_rounds: int) -> Latencies:
    probes, rollouts = [], []
    with httpx.Client(base_url=url, timeout=30) as http:
        for _ in range(num_rounds):
            probes += [_timed(lambda: http.get("/readyz")) for _ in range(4)]
            rollouts.append(_timed(lambda: http.post("/v1/rollouts", json=SMALL)))
            time.sleep(0.002)
    return Latencies(probes=probes, rollouts=rollouts)


@contextmanager
def readers(
    url: str, handle: KvHandle, count: int, bytes_per_second: float = math.inf
) -> Iterator[None]:
    """Processes that each fetch the handle in a loop; the context begins once each has it.

    `bytes_per_second`: the mean rate of each of them.
    """
    command = [sys.executable, "-m", "bench.harness.kv_load", url, str(bytes_per_second)]
    processes = [Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdin and process.stdout
            process.stdin.write(handle.model_dump_json() + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "fetched\n", "the reader has ended"
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def loopback_bytes_per_second(num_bytes: int = 2**29) -> float:
    """Throughput of a bare loopback socket read into memory that is already mapped."""
    piece, room = memoryview(bytes(2**20)), memoryview(bytearray(2**20))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send() -> None:
            connection, _ = listener.accept()
            with connection:
                for _ in range(num_bytes // len(piece)):
                    connection.sendall(piece)

        thread = threading.Thread(target=send)
        thread.start()
        began = time.perf_counter()
        with socket.create_connection(listener.getsockname()) as reader:
            while reader.recv_into(room):
                pass
        seconds = time.perf_counter() - began
        thread.join()
    return num_bytes / seconds


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    answer: httpx.Response = call()
    assert answer.status_code == 200, answer.text
    return 1000 * (time.perf_counter() - began)


def _read_for_ever(url: str, bytes_per_second: float) -> None:
    handle = KvHandle.model_validate_json(sys.stdin.readline())
    source = KvSource(url, transports=["http"])
    buffer = bytearray(handle.num_bytes)
    assert PromptKV.fetch(handle, source, buffer=buffer) is not None
    print("fetched", flush=True)
    while PromptKV.fetch(handle, source, buffer=buffer) is not None:
        source.renew(handle.handle)
        time.sleep(handle.num_bytes / bytes_per_second)


if __name__ == "__main__":
    _read_for_ever(sys.argv[1], float(sys.argv[2]))
