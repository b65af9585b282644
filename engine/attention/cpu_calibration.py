"""A dozen small decode steps, each by vLLM's own CPU attention and by the shared-prefix kernel.

What other processes take of the machine only ever adds to a time, so the least of several counts.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from vllm import _custom_ops as ops

from engine.attention.crossover import Trial, Work
from engine.attention.crossover_cache import Circumstances, processor
from engine.attention.planner import Planner
from kernels.shared_prefix_attention import cpu

REPEATS = 7
NUM_CACHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Of the layers that a crossover is measured for."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    isa: str

    def circumstances(self) -> Circumstances:
        """All that the times depend on, apart from the programs."""
        named = asdict(self) | {"dtype": str(self.dtype)}
        return named | {"processor": processor(), "threads": torch.get_num_threads()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Every group has its own prefix; every row its own suffix behind it."""

    num_groups: int
    group_size: int
    prefix_blocks: int
    suffix_tokens: int


SHAPES = tuple(
    Shape(num_groups=groups, group_size=size, prefix_blocks=blocks, suffix_tokens=suffix)
    for groups, size, blocks, suffix in (
        (1, 2, 1, 20),
        (1, 8, 2, 20),
        (1, 32, 2, 40),
        (8, 2, 1, 100),
        (16, 4, 2, 20),
        (1, 2, 32, 20),
        (1, 8, 32, 20),
        (1, 32, 32, 40),
        (8, 8, 16, 20),
        (4, 2, 32, 200),
        (1, 8, 96, 20),
        (2, 2, 2, 1000),
    )
)


def measure(geometry: Geometry) -> list[Trial]:
    """Under a second on two cores for a small model. Threads are those of the process."""
    return [_Step(geometry, shape).trial() for shape in SHAPES]


class _Step:
    def __init__(self, geometry: Geometry, shape: Shape) -> None:
        self._geometry = geometry
        rows, suffix_blocks = _rows(shape), -(-shape.suffix_tokens // geometry.block_size)
        table = _table(shape, suffix_blocks)
        length = shape.prefix_blocks * geometry.block_size + shape.suffix_tokens
        self._table = torch.from_numpy(table)
        self._lens = torch.full((rows,), length, dtype=torch.int32)
        self._starts = torch.arange(rows + 1, dtype=torch.int32)
        self._plan = Planner(geometry.block_size).plan(table, self._lens.numpy() - 1)
        # Its own chance: the process's may be what unseeded samples are drawn by.
        chance = torch.Generator().manual_seed(0)
        queries = (rows, geometry.num_heads, geometry.head_size)
        self._query = torch.randn(queries, generator=chance).to(geometry.dtype)
        self._out = torch.empty_like(self._query)
        # A model's layers have a cache each; one cache alone would be warm when it is read.
        self._caches = torch.randn(
            NUM_CACHES,
            int(table.max()) + 1,
            geometry.num_kv_heads,
            geometry.block_size,
            2 * geometry.head_size,
            generator=chance,
        ).to(geometry.dtype)
        self._schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=rows,
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_size,
            seq_lens=self._lens,
            dtype=geometry.dtype,
            query_start_loc=self._starts,
            causal=True,
            sliding_window_size=-1,
            isa=geometry.isa,
            enable_kv_split=False,
        )

    def trial(self) -> Trial:
        times: dict[Callable[[torch.Tensor], None], list[float]] = {
            self._stock: [],
            self._shared: [],
        }
        for number in range(1 + REPEATS):
            for way, seconds in times.items():
                cache = self._caches[number % NUM_CACHES]
                began = time.perf_counter()
                way(cache)
                seconds.append(time.perf_counter() - began)
        stock, shared = (seconds[1:] for seconds in times.values())
        return Trial(
            work=Work.of(self._plan, self._lens.numpy(), len(self._query)),
            stock_seconds=min(stock),
            shared_seconds=min(shared),
            steady=all(
                statistics.median(seconds) < 1.5 * min(seconds) for seconds in (stock, shared)
            ),
        )

    def _stock(self, cache: torch.Tensor) -> None:
        blocks, heads, size, _ = cache.shape
        keys, values = cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=self._query,
            key_cache=keys,
            value_cache=values,
            output=self._out,
            query_start_loc=self._starts,
            seq_lens=self._lens,
            scale=0.1,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self._table,
            softcap=0,
            scheduler_metadata=self._schedule,
            s_aux=None,
        )

    def _shared(self, cache: torch.Tensor) -> None:
        step = cpu.Decoding(
            self._plan,
            block_table=self._table,
            seq_lens=self._lens,
            query_start_loc=self._starts,
        )
        step.layer(query=self._query, cache=cache, scale=0.1, out=self._out)


def _rows(shape: Shape) -> int:
    return shape.num_groups * shape.group_size


def _table(shape: Shape, suffix_blocks: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Blocks in no order, as a pool that has been used for a while hands them out."""
    rows, prefix = _rows(shape), shape.num_groups * shape.prefix_blocks
    ids = np.random.default_rng(0).permutation(prefix + rows * suffix_blocks).astype(np.int32)
    shared = ids[:prefix].reshape(shape.num_groups, shape.prefix_blocks)
    own = ids[prefix:].reshape(rows, suffix_blocks)
    return np.hstack([shared.repeat(shape.group_size, axis=0), own])
