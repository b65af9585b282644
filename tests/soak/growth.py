"""Memory of EngineCore and of the service by kind of mapping, while many groups are sampled.

    python -m tests.soak.growth [--groups 30000]

One run with oneDNN's default cache of compiled kernels and one with a small cache, which cannot
hide a leak: in that one both processes must be level after the warm-up. Cached answers expire
during the run.
"""

import argparse
import os
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil

from tests.invariants.service_process import home, service
from tests.soak.__main__ import CALLERS, KERNELS
from tests.soak.group_load import Groups
from tests.soak.resource_usage import ResourceUsage, sample_periodically

CACHE_BYTES = 2**30
FLAGS = (
    "--engine.cpu-threads", "1",
    "--engine.cache-bytes", str(CACHE_BYTES),
    "--limits.keep-answers-seconds", "20",
)  # fmt: skip
KINDS = ("heap", "KV cache", "anonymous", "shared memory", "files")
NUM_ROWS = 10


@dataclass(kw_only=True)
class Breakdown:
    """Resident bytes of one process by kind of mapping, every `step` finished groups."""

    name: str
    process: psutil.Process
    step: int
    rows: list[str] = field(default_factory=list)

    def sample(self, num_done: int) -> None:
        if num_done >= len(self.rows) * self.step:
            self.rows.append(self._row(num_done))

    def _row(self, num_done: int) -> str:
        num_bytes: Counter[str] = Counter()
        for mapping in self.process.memory_maps(grouped=False):
            num_bytes[_kind(mapping.path, mapping.addr)] += mapping.rss
        cells = [f"{num_bytes[kind] / 2**20:.0f}" for kind in KINDS]
        total = f"{num_bytes.total() / 2**20:.0f}"
        return f"| {self.name} | {num_done:,} | {' | '.join([*cells, total])} |"


def _kind(path: str, addresses: str) -> str:
    start, end = (int(address, 16) for address in addresses.split("-"))
    if path == "[heap]":
        return "heap"
    if path == "[anon]":
        return "KV cache" if end - start >= CACHE_BYTES else "anonymous"
    return "shared memory" if path.startswith(("/dev/shm/", "/memfd:")) else "files"


def run(num_groups: int) -> list[ResourceUsage]:
    began = time.monotonic()
    with home() as place, service(place, *FLAGS) as server:
        processes = {"service": psutil.Process(server.process.pid), "EngineCore": server.core}
        levels = [ResourceUsage(name=name, process=process) for name, process in processes.items()]
        step = num_groups // NUM_ROWS
        parts = [
            Breakdown(name=name, process=process, step=step) for name, process in processes.items()
        ]
        groups = Groups(server.url, num_groups)
        with sample_periodically([*levels, *parts], lambda: groups.num_ended):
            groups.run(CALLERS)
        assert not groups.failures, groups.failures[:3]
    print(f"\n{groups.num_ended:,} groups, {time.monotonic() - began:.0f} s, MiB:\n")
    print(f"| process | groups | {' | '.join(KINDS)} | all |\n|{'---|' * (len(KINDS) + 3)}")
    print(*(row for part in parts for row in part.rows), sep="\n", flush=True)
    return levels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=30_000)
    num_groups = parser.parse_args().groups
    run(num_groups)
    os.environ.update(KERNELS)
    for level in run(num_groups):
        level.check()


if __name__ == "__main__":
    main()
