"""Resource usage of a process, sampled repeatedly under load, and its growth."""

import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import psutil

INTERVAL_SECONDS = 1.0
# The first fifth of the work fills caches, pools and the result cache.
WARM_UP = 0.2
MAX_GROWTH = 0.05
MAX_SPREAD = 4


@dataclass(frozen=True, kw_only=True)
class ResourceSample:
    num_done: int
    rss_bytes: int
    num_threads: int
    num_descriptors: int


@dataclass(kw_only=True)
class ResourceUsage:
    """Resource usage of one process."""

    name: str
    process: psutil.Process
    samples: list[ResourceSample] = field(default_factory=list)

    def sample(self, num_done: int) -> None:
        self.samples.append(
            ResourceSample(
                num_done=num_done,
                rss_bytes=self.process.memory_info().rss,
                num_threads=self.process.num_threads(),
                num_descriptors=self.process.num_fds(),
            )
        )

    @property
    def warm(self) -> list[ResourceSample]:
        last = self.samples[-1].num_done
        return [sample for sample in self.samples if sample.num_done >= WARM_UP * last]

    @property
    def growth(self) -> float:
        """Growth of the fitted line after the warm-up, relative to its start."""
        slope, base = statistics.linear_regression(
            [sample.num_done for sample in self.warm], [sample.rss_bytes for sample in self.warm]
        )
        first, last = self.warm[0].num_done, self.warm[-1].num_done
        return slope * (last - first) / (base + slope * first)

    def check(self) -> None:
        assert self.growth < MAX_GROWTH, f"{self.name} grew by {self.growth:.1%}"
        for field_name in ("num_threads", "num_descriptors"):
            first, last = self._medians(field_name)
            assert abs(last - first) <= MAX_SPREAD, f"{self.name}: {field_name} {first} to {last}"

    def row(self) -> str:
        first, last = self.warm[0], self.warm[-1]
        threads, descriptors = self._medians("num_threads"), self._medians("num_descriptors")
        return (
            f"| {self.name} | {first.rss_bytes / 2**20:.0f} to {last.rss_bytes / 2**20:.0f} MiB "
            f"| {self.growth:+.1%} | {threads[0]:.0f} to {threads[1]:.0f} "
            f"| {descriptors[0]:.0f} to {descriptors[1]:.0f} |"
        )

    def _medians(self, name: str) -> tuple[float, float]:
        """Medians of the first and the last third after the warm-up."""
        values = [getattr(sample, name) for sample in self.warm]
        third = max(1, len(values) // 3)
        return statistics.median(values[:third]), statistics.median(values[-third:])


class Watched(Protocol):
    def sample(self, num_done: int) -> None: ...


@contextmanager
def sample_periodically(usage: Sequence[Watched], num_done: Callable[[], int]) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        while not over.wait(INTERVAL_SECONDS):
            for level in usage:
                level.sample(num_done())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
