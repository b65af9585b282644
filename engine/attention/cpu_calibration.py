"""CPU benchmark at startup: vLLM's attention against the shared-prefix kernel.

The crossover model is fitted to these times. Interference by other processes only ever adds time,
so the minimum of several repetitions is used.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from vllm import _custom_ops as ops

from engine.attention.crossover import (
    BatchShape,
    CacheKey,
    CrossoverTrial,
    StepWork,
    processor_name,
)
from engine.attention.grouping import Planner
from kernels.shared_prefix_attention import cpu

REPEATS = 7
NUM_CACHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """Geometry of the attention layers for which both kernels are timed."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    isa: str

    def cache_key(self) -> CacheKey:
        """All inputs that the attention times depend on, apart from software versions."""
        named = asdict(self) | {"dtype": str(self.dtype)}
        return named | {"processor_name": processor_name(), "threads": torch.get_num_threads()}


SHAPES = tuple(
    BatchShape(num_groups=groups, group_size=size, prefix_blocks=blocks, suffix_tokens=suffix)
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


def measure_trials(geometry: LayerGeometry) -> list[CrossoverTrial]:
    """Time the batches in SHAPES with both attention kernels, on the threads of this process.

    This takes less than a second on two cores for a small model.
    """
    return [_TimedStep(geometry, shape).trial() for shape in SHAPES]


class _TimedStep:
    def __init__(self, geometry: LayerGeometry, shape: BatchShape) -> None:
        self._geometry = geometry
        rows = shape.num_rows
        table = shape.block_table(geometry.block_size)
        length = shape.prefix_blocks * geometry.block_size + shape.suffix_tokens
        self._block_table = torch.from_numpy(table)
        self._seq_lens = torch.full((rows,), length, dtype=torch.int32)
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32)
        self._plan = Planner(geometry.block_size).plan(table, self._seq_lens.numpy() - 1)
        # A separate generator: the process's own may be used to sample unseeded requests.
        generator = torch.Generator().manual_seed(0)
        queries = (rows, geometry.num_heads, geometry.head_size)
        self._query = torch.randn(queries, generator=generator).to(geometry.dtype)
        self._out = torch.empty_like(self._query)
        # Each layer of a model has its own cache; a single one would be warm in the processor's
        # caches.
        self._caches = torch.randn(
            NUM_CACHES,
            int(table.max()) + 1,
            geometry.num_kv_heads,
            geometry.block_size,
            2 * geometry.head_size,
            generator=generator,
        ).to(geometry.dtype)
        self._schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=rows,
            num_heads=geometry.num_heads,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_size,
            seq_lens=self._seq_lens,
            dtype=geometry.dtype,
            query_start_loc=self._query_starts,
            causal=True,
            sliding_window_size=-1,
            isa=geometry.isa,
            enable_kv_split=False,
        )

    def trial(self) -> CrossoverTrial:
        times: dict[Callable[[torch.Tensor], None], list[float]] = {
            self._stock: [],
            self._shared: [],
        }
        for number in range(1 + REPEATS):
            for kernel, seconds in times.items():
                cache = self._caches[number % NUM_CACHES]
                began = time.perf_counter()
                kernel(cache)
                seconds.append(time.perf_counter() - began)
        stock, shared = (seconds[1:] for seconds in times.values())
        return CrossoverTrial(
            work=StepWork.of(self._plan, self._seq_lens.numpy(), self._query_starts.diff().numpy()),
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
            query_start_loc=self._query_starts,
            seq_lens=self._seq_lens,
            scale=0.1,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self._block_table,
            softcap=0,
            scheduler_metadata=self._schedule,
            s_aux=None,
        )

    def _shared(self, cache: torch.Tensor) -> None:
        step = cpu.DecodeStep(
            self._plan,
            block_table=self._block_table,
            seq_lens=self._seq_lens,
            query_start_loc=self._query_starts,
        )
        step.layer(query=self._query, cache=cache, scale=0.1, out=self._out)
