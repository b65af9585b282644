"""Patch that decides on GPU, per step, whether attention shares prefixes, before graph selection.

vLLM's full CUDA graphs contain its own attention. A step that shares prefixes is therefore
dispatched like a step with prefill rows, to a piecewise graph, whose attention runs outside the
graph. All other steps keep their full graphs and vLLM's attention.

The decision needs the block tables on the host. Model Runner V2 keeps them on the device and sends
only changes, so the same changes are written to a mirror. Model Runner V1 is not supported.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from engine.attention.counters import COUNTERS
from engine.attention.target_builders import target_builders
from engine.runtime.feature_guard import feature
from kernels.shared_prefix_attention.sharing_plan import Int32s

FEATURE = feature("shared-prefix planning")
"""Failures here are the same on all ranks, so that all ranks select the same graphs."""


class HostBlockTables:
    """Host mirror of the block tables of Model Runner V2, one per KV cache group.

    Rows are in the order of the runner's request table, not of a step's batch.
    """

    def __init__(self, block_tables: Any) -> None:
        shapes = [tuple(table.shape) for table in block_tables.input_block_tables]
        self._tables = [np.zeros(shape, np.int32) for shape in shapes]
        self._num_blocks = block_tables.num_blocks.np

    def record(
        self, req_index: int, new_block_ids: Sequence[Sequence[int]], start: Sequence[int]
    ) -> None:
        """Write the blocks that a request receives; `start` is its number of blocks per group."""
        for table, block_ids, first in zip(self._tables, new_block_ids, start, strict=True):
            table[req_index, first : first + len(block_ids)] = block_ids

    def rows(self, group: int, req_indices: np.ndarray[Any, Any]) -> Int32s:
        """The block table of a step's rows, cut after the last used column."""
        columns = int(self._num_blocks[group, req_indices].max(initial=1))
        rows: Int32s = self._tables[group][req_indices, :columns]
        return rows


def host_block_tables(block_tables: Any) -> HostBlockTables | None:
    """The mirror of vLLM's `BlockTables`; None if it was made before `install`."""
    return getattr(block_tables, _MIRROR, None)


_MIRROR = "_coppice_host_block_tables"
_step_shares = _is_dummy = False


def step_shares() -> bool:
    """Return whether rows share prefixes in the step whose CUDA graph is being selected."""
    return _step_shares


def is_dummy_step() -> bool:
    """Return whether the step whose CUDA graph is being selected has no requests."""
    return _is_dummy


@FEATURE.guarded_with_default(None)
def create_mirror(block_tables: Any) -> None:
    setattr(block_tables, _MIRROR, HostBlockTables(block_tables))


@FEATURE.guarded_with_default(None)
def record_blocks(
    block_tables: Any, req_index: int, new_block_ids: Sequence[Sequence[int]], overwrite: bool
) -> None:
    """Record blocks that the runner adds to a request, before it updates `num_blocks`."""
    mirror = host_block_tables(block_tables)
    if mirror is None:
        return
    if block_tables.redirect_writes_to_null_block:
        new_block_ids = [[0] * len(block_ids) for block_ids in new_block_ids]
    counts = block_tables.num_blocks.np[:, req_index]
    mirror.record(req_index, new_block_ids, [0] * len(counts) if overwrite else counts.tolist())


@FEATURE.guarded_with_default(False)
def plan_step(runner: Any, batch: Any) -> bool:
    """Group the rows of a step for each metadata builder; returns whether any rows share."""
    builders = list(target_builders(runner))
    mirror = host_block_tables(runner.block_tables) if builders else None
    if mirror is None:
        return False
    query_starts = np.concatenate([[0], np.cumsum(batch.num_scheduled_tokens)]).astype(np.int32)
    computed = runner.req_states.num_computed_tokens_np[batch.idx_mapping_np]
    seq_lens = (computed + batch.num_scheduled_tokens).astype(np.int32)
    shares = False
    for group, builder in builders:
        builder.cancel_plan()
        if not _runs_piecewise(runner):
            COUNTERS.record_skipped("cuda_graphs")
        elif runner.block_tables.block_sizes[group] != builder.block_size:
            COUNTERS.record_skipped("block_size")
        else:
            table = mirror.rows(group, batch.idx_mapping_np)
            shares |= builder.plan(table, seq_lens, query_starts)
    return shares


def _runs_piecewise(runner: Any) -> bool:
    """Return whether a step dispatched like one with prefill rows runs attention outside a graph.

    Without any graphs it has. Graphs for decode rows of any length also match such a step.
    """
    manager = runner.cudagraph_manager
    mode = manager.cudagraph_mode
    if not mode.has_full_cudagraphs():
        return True
    return mode.has_piecewise_cudagraphs() and not manager.varlen_decode


def planned(gather: Callable[..., Any]) -> Callable[..., Any]:
    """`GPUModelRunner.gather_batch_req_state`, which vLLM calls just before it selects a graph.

    Without a uniform number of query tokens, vLLM selects a graph for steps with prefill rows. vLLM
    also calls it for dummy runs, of which the first are before the KV cache is configured.
    """

    @functools.wraps(gather)
    def gather_batch_req_state(self: Any, scheduler_output: Any, dummy_run: bool) -> Any:
        global _step_shares, _is_dummy
        _is_dummy = dummy_run
        batch, uniform_token_count = gather(self, scheduler_output, dummy_run)
        _step_shares = batch is not None and plan_step(self, batch)
        if not _step_shares:
            for _, builder in target_builders(self):
                builder.cancel_plan()
        return batch, None if _step_shares else uniform_token_count

    return gather_batch_req_state


@functools.cache
def install() -> None:
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    init, append = BlockTables.__init__, BlockTables.append_block_ids

    @functools.wraps(init)
    def init_with_mirror(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        create_mirror(self)

    @functools.wraps(append)
    def append_block_ids(self: Any, *args: Any, **named: Any) -> None:
        record_blocks(self, *args, **named)
        append(self, *args, **named)

    BlockTables.__init__ = init_with_mirror
    BlockTables.append_block_ids = append_block_ids
    GPUModelRunner.gather_batch_req_state = planned(GPUModelRunner.gather_batch_req_state)
