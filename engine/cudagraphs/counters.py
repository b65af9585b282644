"""Per-process counters of CUDA graph memory, hits and padding.

The heartbeat carries them to /metrics.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypedDict

from engine.cudagraphs.planner import Plan
from engine.cudagraphs.shapes import UNEVEN
from engine.types.feature_stats import CudaGraphStats, total


class Snapshot(TypedDict):
    """CUDA graph counters of one rank, as sent to the service.

    Each entry of `misses` is (samples, tokens per sample, steps).
    """

    num_graphs: int
    budget_bytes: int
    estimated_bytes: int
    measured_bytes: int
    hits: int
    mixed: int
    misses: list[tuple[int, int, int]]


class Counters:
    """CUDA graph counters, written by the thread that runs the steps and read between two steps."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._measured_bytes = 0
        self.reset()

    def set_plan(self, plan: Plan, measured_bytes: int) -> None:
        self._plan, self._measured_bytes = plan, measured_bytes

    def reset(self) -> None:
        """Reset the counts of hits and misses, after the warm-up steps."""
        self._hits, self._mixed = 0, 0
        self._misses: Counter[tuple[int, int]] = Counter()

    def record_decode(self, *, samples: int, query_len: int | None, hit: bool) -> None:
        """Count a decode step; `query_len` is None if samples had different numbers of tokens."""
        if hit:
            self._hits += 1
        else:
            self._misses[1 << (samples - 1).bit_length(), query_len or UNEVEN] += 1

    def record_mixed(self) -> None:
        self._mixed += 1

    def read(self) -> Snapshot | None:
        """Current counters; None before graphs were captured for a plan."""
        if self._plan is None:
            return None
        return Snapshot(
            num_graphs=len(self._plan.shapes),
            budget_bytes=self._plan.budget_bytes or 0,
            estimated_bytes=self._plan.estimated_bytes,
            measured_bytes=self._measured_bytes,
            hits=self._hits,
            mixed=self._mixed,
            misses=[
                (samples, query_len, steps) for (samples, query_len), steps in self._misses.items()
            ],
        )


COUNTERS = Counters()


def aggregate_ranks(ranks: Iterable[Snapshot | None]) -> CudaGraphStats:
    """CUDA graph statistics over all ranks of an engine.

    All ranks capture the same graphs and run the same steps; `measured_bytes` is the maximum.
    """
    counted = [rank for rank in ranks if rank is not None]
    if not counted:
        return CudaGraphStats()
    first = counted[0]
    return CudaGraphStats(
        num_graphs=first["num_graphs"],
        budget_bytes=first["budget_bytes"],
        estimated_bytes=first["estimated_bytes"],
        measured_bytes=max(rank["measured_bytes"] for rank in counted),
        hits=first["hits"],
        mixed=first["mixed"],
        misses={(samples, query_len): steps for samples, query_len, steps in first["misses"]},
    )


def aggregate_engines(engines: Sequence[CudaGraphStats]) -> CudaGraphStats:
    """CUDA graph statistics over data-parallel engines, which capture the same graphs."""
    first, summed = engines[0], total(engines)
    return replace(
        summed,
        num_graphs=first.num_graphs,
        budget_bytes=first.budget_bytes,
        estimated_bytes=first.estimated_bytes,
        measured_bytes=max(engine.measured_bytes for engine in engines),
    )
