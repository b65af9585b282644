"""GPU benchmark at startup: vLLM's attention against shared-prefix attention.

The GPU's work is timed in CUDA graphs, for both kinds alike, and with a cold L2 cache: between two
layers a model reads more weights than the cache holds. Attention with shared prefixes runs between
the pieces of a piecewise graph, so its launches are timed as well, each after a small graph. Where
they take longer than the GPU's work, they decide. Neither the launches of vLLM's own code around a
piece nor the GPU's other work, behind which launches hide, are part of the model.

A calibration step has one query token per row. Rows with draft tokens cost as much: a tile of
FlashAttention holds all of them, and reads the KV once. So the unit of work is a row.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform
from vllm.v1.attention.backends import fa_utils

from engine.attention import crossover
from engine.attention.crossover import (
    BatchShape,
    CacheKey,
    Crossover,
    CrossoverTrial,
    StepWork,
    steady_trial,
)
from engine.attention.cuda_timing import Timer, graph_times, launch_times
from engine.attention.grouping import Planner
from engine.runtime.process_environment import cache_directory
from kernels.shared_prefix_attention import cuda
from kernels.shared_prefix_attention.sharing_plan import Int32s

VERSION = 2
"""Version of the measurement, part of the key of cached results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGeometry:
    """Geometry of the attention layers for which both kinds of attention are timed."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    fa_version: int

    def cache_key(self) -> CacheKey:
        """All inputs that the attention times depend on."""
        named = asdict(self) | {"dtype": str(self.dtype), "gpu": current_platform.get_device_name()}
        return named | {"vllm": vllm_version, "measurement": VERSION}


SHAPES = (
    (1, 4, 256, 64),
    (1, 16, 512, 64),
    (1, 64, 1024, 128),
    (16, 4, 256, 128),
    (16, 16, 1024, 64),
    (8, 8, 256, 512),
    (4, 8, 2048, 512),
    (1, 8, 4096, 128),
    (1, 64, 4096, 256),
    (4, 16, 4096, 128),
    (2, 16, 8192, 256),
    (32, 8, 128, 64),
    (2, 2, 256, 2048),
)
"""Number of groups, rows per group, and tokens of each prefix and suffix.

The largest cache has 34,816 tokens, 143 MB for 8 KV heads of 128 in bfloat16.
"""


def geometry_of(builder: Any) -> LayerGeometry:
    """Geometry of the layers of a metadata builder."""
    return LayerGeometry(
        num_heads=builder.num_heads_q,
        num_kv_heads=builder.num_heads_kv,
        head_size=builder.headdim,
        block_size=builder.block_size,
        dtype=builder.model_config.dtype,
        fa_version=fa_utils.get_flash_attn_version(head_size=builder.headdim) or 2,
    )


@cache
def crossover_of(geometry: LayerGeometry) -> Crossover:
    """Crossover of this GPU, measured by the first start with such layers."""
    found = crossover.crossover(
        cache_directory("attention"), geometry.cache_key(), partial(measure_trials, geometry)
    )
    torch.accelerator.empty_cache()
    return found


def measure_trials(geometry: LayerGeometry) -> list[CrossoverTrial]:
    """Time the steps in SHAPES with both kinds of attention."""
    size = geometry.block_size
    shapes = [
        BatchShape(num_groups=n, group_size=rows, prefix_blocks=-(-p // size), suffix_tokens=s)
        for n, rows, p, s in SHAPES
    ]
    return [_trial(_step(geometry, shape)) for shape in shapes]


def compile_kernels(geometry: LayerGeometry) -> None:
    """Compile the kernels of a step with shared prefixes, for any number of rows.

    Triton compiles for strides that are multiples of 16 and for others.
    """
    for rows in (2, 16):
        shape = BatchShape(num_groups=1, group_size=rows, prefix_blocks=1, suffix_tokens=1)
        _step(geometry, shape).shared_call()()


def _step(geometry: LayerGeometry, shape: BatchShape) -> "CalibrationStep":
    length = shape.prefix_blocks * geometry.block_size + shape.suffix_tokens
    lens = np.full(shape.num_rows, length, np.int32)
    table = shape.block_table(geometry.block_size)
    return CalibrationStep(
        geometry, table, lens, torch.device(current_platform.device_type), fa_utils
    )


def _trial(step: "CalibrationStep") -> CrossoverTrial:
    return steady_trial(lambda: step.trial(graph_times, launch_times))


class CalibrationStep:
    """Decode step of one layer, with vLLM's attention and with shared prefixes."""

    def __init__(
        self,
        geometry: LayerGeometry,
        table: Int32s,
        lens: Int32s,
        device: torch.device,
        flash: Any,
    ) -> None:
        """Create the inputs of a step whose rows have this block table and these lengths.

        `flash` has FlashAttention's functions, as vLLM's `fa_utils`.
        """
        self._geometry, self._flash, self._lens, rows = geometry, flash, lens, len(lens)
        self._plan = Planner(geometry.block_size).plan(table, lens - 1)
        starts = np.arange(rows + 1, dtype=np.int32)
        self._query_starts = torch.from_numpy(starts).to(device)
        self._block_table = torch.from_numpy(table).to(device)
        self._seq_lens = torch.from_numpy(lens).to(device)
        self._lists = cuda.StepLists.of(self._plan, starts, device)
        self._suffixes = cuda.SuffixTable.of(
            self._lists,
            block_table=self._block_table,
            seq_lens=self._seq_lens,
            max_len=int((lens - self._plan.suffix_starts).max()),
            block_size=geometry.block_size,
        )
        heads, size, dtype = geometry.num_heads, geometry.head_size, geometry.dtype
        self._query = torch.zeros(rows, heads, size, dtype=dtype, device=device)
        self.out = torch.empty_like(self._query)
        cache_shape = int(table.max()) + 1, geometry.block_size, geometry.num_kv_heads, 2 * size
        self.cache = torch.zeros(cache_shape, dtype=dtype, device=device)

    def trial(self, gpu_times: Timer, launch_times: Timer) -> CrossoverTrial:
        stock, shared = gpu_times(self.stock_call()), gpu_times(self.shared_call())
        return CrossoverTrial(
            work=StepWork.of(self._plan, self._lens, np.ones_like(self._lens)),
            stock_seconds=min(stock),
            shared_seconds=min(shared),
            launch_seconds=min(launch_times(self.shared_call())),
            steady=all(statistics.median(times) < 1.5 * min(times) for times in (stock, shared)),
        )

    def stock_call(self) -> Callable[[], None]:
        """A call of vLLM's attention."""
        return partial(self._stock, self._schedule())

    def shared_call(self) -> Callable[[], None]:
        """A call of attention with shared prefixes."""
        return partial(self._shared, *self._pass_schedules())

    def _stock(self, schedule: torch.Tensor | None) -> None:
        self._bound()(
            q=self._query,
            out=self.out,
            cu_seqlens_q=self._query_starts,
            max_seqlen_q=1,
            seqused_k=self._seq_lens,
            max_seqlen_k=int(self._lens.max()),
            block_table=self._block_table,
            causal=True,
            scheduler_metadata=schedule,
        )

    def _shared(self, nodes: torch.Tensor | None, suffixes: torch.Tensor | None) -> None:
        cuda.attend(
            self._bound(),
            self._lists,
            self._suffixes,
            query=self._query,
            query_starts=self._query_starts,
            max_query_len=1,
            out=self.out,
            node_options={"scheduler_metadata": nodes},
            suffix_options={"scheduler_metadata": suffixes},
        )

    def _bound(self) -> Callable[..., Any]:
        keys, values = torch.split(self.cache, self._geometry.head_size, dim=-1)
        return partial(
            self._flash.flash_attn_varlen_func,
            k=keys,
            v=values,
            softmax_scale=self._geometry.head_size**-0.5,
            fa_version=self._geometry.fa_version,
        )

    def _schedule(self) -> torch.Tensor | None:
        return self._metadata(self._query_starts, 1, self._seq_lens, int(self._lens.max()), True)

    def _pass_schedules(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        lists, suffixes = self._lists, self._suffixes
        return (
            self._metadata(
                lists.node_query_starts,
                lists.max_node_query_len,
                lists.node_tokens,
                lists.max_node_tokens,
                False,
            ),
            self._metadata(self._query_starts, 1, suffixes.lens, suffixes.max_len, True),
        )

    def _metadata(
        self, starts: torch.Tensor, max_query: int, lens: torch.Tensor, max_len: int, causal: bool
    ) -> torch.Tensor | None:
        geometry = self._geometry
        if geometry.fa_version != 3:
            return None
        metadata: torch.Tensor = self._flash.get_scheduler_metadata(
            batch_size=len(lens),
            max_seqlen_q=max_query,
            max_seqlen_k=max_len,
            num_heads_q=geometry.num_heads,
            num_heads_kv=geometry.num_kv_heads,
            headdim=geometry.head_size,
            cache_seqlens=lens,
            qkv_dtype=geometry.dtype,
            cu_seqlens_q=starts,
            page_size=geometry.block_size,
            causal=causal,
        )
        return metadata
