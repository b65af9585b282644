"""Cost model that picks, per step, vLLM's attention or the shared-prefix kernel.

The time of either kernel is modeled as a sum of non-negative costs (per call, per query token, per
shared node, per token of KV cache packed, per token of KV cache read for a query), fitted to the
times of a dozen small steps at startup. A kernel that is launched layer by layer takes at least as
long as its launches.

Fitted costs are cached in files, so that only a machine's first start measures them. The file name
is a digest of all inputs that the times depend on, and the content lists them. An unreadable file
is measured again; after a failed write, or a measurement on a busy machine, the next start measures
again.
"""

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from engine.runtime.start_phases import phase
from kernels.shared_prefix_attention.sharing_plan import Int32s, SharingPlan

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Quantities of attention work in one step, from which its time is predicted.

    A node is a prefix range that several rows share. A pair is a query token and a KV cache token
    that it reads. A kernel that reads the KV of a row once for all of its query tokens counts rows
    instead: then `num_queries` is the number of work units per KV head.
    """

    num_queries: int
    num_nodes: int
    node_tokens: int
    prefix_pairs: int
    suffix_pairs: int

    @classmethod
    def of(cls, plan: SharingPlan, seq_lens: Int32s, query_lens: Int32s) -> Self:
        """Attention work of a step with this sharing plan."""
        starts = plan.suffix_starts
        return cls(
            num_queries=int(query_lens.sum()),
            num_nodes=len(plan.node_tokens),
            node_tokens=_num_node_tokens(plan),
            prefix_pairs=int(np.dot(query_lens, starts)),
            suffix_pairs=int(np.dot(query_lens, seq_lens - starts)),
        )

    def stock_terms(self) -> list[float]:
        return [1.0, self.num_queries, self.prefix_pairs + self.suffix_pairs]

    def shared_terms(self) -> list[float]:
        terms = (self.num_queries, self.num_nodes, self.node_tokens)
        return [1.0, *terms, self.prefix_pairs, self.suffix_pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Calibration batch: the rows of a group share a prefix, and every row has its own suffix."""

    num_groups: int
    group_size: int
    prefix_blocks: int
    suffix_tokens: int

    @property
    def num_rows(self) -> int:
        return self.num_groups * self.group_size

    def block_table(self, block_size: int) -> Int32s:
        """Block table of the batch, with blocks in random order, as from a block pool in use."""
        prefix, own = self.num_groups * self.prefix_blocks, -(-self.suffix_tokens // block_size)
        num_blocks = prefix + self.num_rows * own
        ids = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        shared = ids[:prefix].reshape(self.num_groups, self.prefix_blocks)
        suffixes = ids[prefix:].reshape(self.num_rows, own)
        return np.hstack([shared.repeat(self.group_size, axis=0), suffixes])


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossoverTrial:
    """Times of one calibration step with vLLM's and shared-prefix attention, per layer.

    `launch_seconds` is the time to launch shared-prefix attention, 0 if it runs as it is called.
    `steady` is True if repetitions of the step took similar times.
    """

    work: StepWork
    stock_seconds: float
    shared_seconds: float
    launch_seconds: float = 0.0
    steady: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Fitted costs of vLLM's and shared-prefix attention, in seconds per unit of work.

    Costs are in the order of `StepWork.stock_terms` and `StepWork.shared_terms`. Launches of
    shared-prefix attention take `launch_seconds`, while the GPU works.
    """

    stock: tuple[float, ...]
    shared: tuple[float, ...]
    launch_seconds: float = 0.0

    @classmethod
    def fit(cls, trials: Sequence[CrossoverTrial]) -> Self:
        return cls(
            stock=_fit_costs([(t.work.stock_terms(), t.stock_seconds) for t in trials]),
            shared=_fit_costs([(t.work.shared_terms(), t.shared_seconds) for t in trials]),
            launch_seconds=min(trial.launch_seconds for trial in trials),
        )

    def is_faster(self, work: StepWork) -> bool:
        shared = max(_dot(self.shared, work.shared_terms()), self.launch_seconds)
        return shared < _dot(self.stock, work.stock_terms())

    def __str__(self) -> str:
        return "sharing pays " + ", ".join(
            f"from {rows} samples per prefix of {tokens} tokens"
            if (rows := self._min_rows(tokens)) is not None
            else f"at no number of samples up to {MAX_LOGGED_ROWS} for {tokens} tokens"
            for tokens in LOGGED_PREFIXES
        )

    def _min_rows(self, prefix_tokens: int) -> int | None:
        """Smallest group, alone in its step, that is faster with shared-prefix attention."""
        sizes = range(2, MAX_LOGGED_ROWS + 1)
        return next((n for n in sizes if self.is_faster(_group(n, prefix_tokens))), None)


LOGGED_PREFIXES, MAX_LOGGED_ROWS = (512, 4096), 256


def _group(num_rows: int, prefix_tokens: int, suffix_tokens: int = 128) -> StepWork:
    return StepWork(
        num_queries=num_rows,
        num_nodes=1,
        node_tokens=prefix_tokens,
        prefix_pairs=num_rows * prefix_tokens,
        suffix_pairs=num_rows * suffix_tokens,
    )


def steady_trial(measure: Callable[[], CrossoverTrial]) -> CrossoverTrial:
    """The first steady trial of a few, or the last one."""
    trial = measure()
    for _ in range(MAX_TRIALS - 1):
        if trial.steady:
            break
        trial = measure()
    return trial


# Cached because a plan serves many steps.
@lru_cache(maxsize=4)
def _num_node_tokens(plan: SharingPlan) -> int:
    return int(plan.node_tokens.sum())


def _dot(costs: Sequence[float], terms: Sequence[float]) -> float:
    return sum(cost * term for cost, term in zip(costs, terms, strict=True))


def _fit_costs(samples: Sequence[tuple[list[float], float]]) -> tuple[float, ...]:
    """Fit non-negative costs by least squares of relative errors.

    Terms with a negative cost are removed, the most negative first.
    """
    terms = np.array([terms for terms, _ in samples])
    seconds = np.array([seconds for _, seconds in samples])
    relative: Floats = terms / seconds[:, None]
    costs = np.zeros(terms.shape[1])
    kept = np.arange(terms.shape[1])
    while len(kept):
        found = np.linalg.lstsq(relative[:, kept], np.ones(len(seconds)), rcond=None)[0]
        if (found >= 0).all():
            costs[kept] = found
            break
        kept = np.delete(kept, found.argmin())
    return tuple(costs.tolist())


logger = logging.getLogger(__name__)
MIN_STEADY_SHARE = 0.75
MAX_TRIALS = 3
CacheKey = dict[str, str | int]


def crossover(
    directory: Path, cache_key: CacheKey, measure: Callable[[], Sequence[CrossoverTrial]]
) -> Crossover:
    file = directory / f"{_digest_of(cache_key)}.json"
    kept = _read(file)
    if kept is not None:
        return kept
    began = time.perf_counter()
    with phase("calibrating"):
        trials = measure()
    measured = Crossover.fit(trials)
    seconds = time.perf_counter() - began
    logger.info("attention crossover measured in %.1f s: %s", seconds, measured)
    if sum(trial.steady for trial in trials) < MIN_STEADY_SHARE * len(trials):
        logger.info("attention crossover not cached: the machine was busy during the measurement")
        return measured
    try:
        _write(file, json.dumps({"of": cache_key, "costs": asdict(measured)}, indent=2))
    except OSError as error:
        logger.warning("attention crossover not cached: %s", error)
    return measured


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _digest_of(cache_key: CacheKey) -> str:
    return hashlib.sha256(json.dumps(cache_key, sort_keys=True).encode()).hexdigest()[:16]


def _read(file: Path) -> Crossover | None:
    try:
        costs = json.loads(file.read_text())["costs"]
        return Crossover(
            stock=tuple(costs["stock"]),
            shared=tuple(costs["shared"]),
            launch_seconds=float(costs.get("launch_seconds", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, text: str) -> None:
    """Write a file atomically, as ranks and replicas that start concurrently write the same one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(text)
    part.replace(file)
