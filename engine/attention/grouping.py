"""Grouping of a step's batch rows by common KV blocks (shared prefixes).

The result is a plan of the shared KV blocks, or the reason why the step uses vLLM's attention.
Decode rows come first in a step, so the rows that can be grouped are a leading run; the prefill
rows after them use vLLM's attention.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.attention.counters import Counters
from engine.attention.crossover import Crossover, StepWork
from engine.attention.settings import SharedPrefixMode
from engine.types.feature_stats import AttentionFallbackReason
from kernels.shared_prefix_attention.sharing_plan import Int32s, SharingPlan

Int64s = NDArray[np.int64]
_NONE = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class _CachedPlan:
    """A sharing plan and the part of the block tables from which it was computed.

    It is valid while these columns and depths are unchanged.
    """

    plan: SharingPlan
    num_rows: int
    columns: Int32s
    open_rows: Int64s
    open_depths: Int32s


class Planner:
    """Finds the rows of a step that share KV cache blocks, and keeps the plan while it is valid.

    There is one per KV cache group, used by one thread. Rows share a prefix where their physical
    block ids are equal from column 0 on. There may be any number of groups, of any size, depth and
    order of rows. Each round handles all groups of one tree level at once: it finds each group's
    common length, makes it a node, and splits the group's rows by the next column.

    It works on host numpy arrays only, so it never synchronizes with a device.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._cached: _CachedPlan | None = None
        self.num_plans = 0

    def plan(self, table: Int32s, first_positions: Int32s) -> SharingPlan:
        """The sharing plan of a step; `table` is [rows, columns].

        A row shares only blocks before its first query's position: from there on its queries differ
        in the length they attend to.
        """
        depths = (first_positions + 1) // self._block_size
        if self._cached is None or not _is_valid(self._cached, table, depths, self._block_size):
            self._cached = _build(table, depths, self._block_size)
            self.num_plans += 1
        return self._cached.plan


def _is_valid(cached: _CachedPlan, table: Int32s, depths: Int32s, block_size: int) -> bool:
    """Return whether a cached sharing plan is valid for the block tables of this step.

    New blocks in columns that were not compared change nothing: a running row only receives blocks
    that no other row has, and what it shares with a new row is in the new row's table.
    """
    return (
        len(table) == cached.num_rows
        and np.array_equal(table[:, : cached.columns.shape[1]], cached.columns)
        and np.array_equal(depths[cached.open_rows], cached.open_depths)
        and bool((cached.plan.suffix_starts <= depths * block_size).all())
    )


def _build(table: Int32s, depths: Int32s, block_size: int) -> _CachedPlan:
    builder = _PlanBuilder(table, depths)
    rows = np.flatnonzero(depths > 0)
    groups = np.zeros(len(rows), dtype=np.int64)
    starts = np.zeros(len(rows), dtype=np.int32)
    while len(rows) > 1:
        rows, groups, starts = builder.level(rows, groups, starts)
    open_rows = np.flatnonzero(builder.open)
    return _CachedPlan(
        builder.plan(block_size),
        len(table),
        table[:, : builder.num_columns].copy(),
        open_rows,
        depths[open_rows],
    )


class _PlanBuilder:
    """Builds the tree of prefixes that a step's rows share, level by level."""

    def __init__(self, table: Int32s, depths: Int32s) -> None:
        self._table = table
        self._depths = depths
        self._shared = np.zeros(len(table), dtype=np.int32)
        self._blocks: list[Int32s] = []
        self._num_blocks: list[Int32s] = []
        self._rows: list[Int64s] = []
        self._sizes: list[Int64s] = []
        # Rows limited only by their depth: they may share more blocks once they are longer.
        self.open = depths == 0
        self.num_columns = 1

    def level(self, rows: Int64s, groups: Int64s, starts: Int32s) -> tuple[Int64s, Int64s, Int32s]:
        """Add the nodes of one tree level; returns rows, groups and starts of the next level.

        Rows of a group have the same blocks before their start.
        """
        rows, starts, sizes = _split(rows, groups, starts, self._table[rows, starts])
        if len(rows) == 0:
            return rows, groups[:0], starts
        offsets, depths = sizes.cumsum() - sizes, self._depths[rows]
        first_column, stop = int(starts.min()), int(depths.max())
        columns = self._table[:, first_column:stop][rows]
        num_equal = _num_equal(columns, offsets)
        ends: Int32s = np.minimum(first_column + num_equal, np.minimum.reduceat(depths, offsets))
        self.num_columns = max(self.num_columns, min(int(ends.max()) + 1, stop))
        self._add_nodes(
            rows, sizes, columns[offsets], starts[offsets] - first_column, ends - first_column
        )
        end_of = ends.repeat(sizes)
        self._shared[rows] = end_of
        on = depths != end_of
        self.open[rows[~on]] = True
        return rows[on], np.arange(len(sizes)).repeat(sizes)[on], end_of[on]

    def _add_nodes(
        self, rows: Int64s, sizes: Int64s, columns: Int32s, starts: Int32s, ends: Int32s
    ) -> None:
        """Add a node per row of `columns`, with its blocks from start to end."""
        at = np.arange(columns.shape[1], dtype=np.int32)
        self._blocks.append(columns[(at >= starts[:, None]) & (at < ends[:, None])])
        self._num_blocks.append(ends - starts)
        self._rows.append(rows)
        self._sizes.append(sizes)

    def plan(self, block_size: int) -> SharingPlan:
        num_blocks = _concatenate(self._num_blocks)
        sizes = _concatenate(self._sizes)
        return SharingPlan(
            node_blocks=_concatenate(self._blocks),
            node_block_offsets=_offsets(num_blocks),
            node_tokens=num_blocks * np.int32(block_size),
            node_rows=_concatenate(self._rows),
            node_row_offsets=_offsets(sizes),
            suffix_starts=self._shared * np.int32(block_size),
        )


def _num_equal(columns: Int32s, offsets: Int64s) -> Int32s:
    """Number of leading columns in which all rows of a group are equal; groups start at offsets."""
    num_rows, num_columns = columns.shape
    # One more column, so that each group has a difference; padded to whole words of eight.
    differs = np.zeros((num_rows, num_columns // 8 * 8 + 8), dtype=np.bool_)
    np.not_equal(columns[1:], columns[:-1], out=differs[1:, :num_columns])
    differs[offsets] = False
    in_group = np.bitwise_or.reduceat(differs.view(np.uint64), offsets, axis=0).view(np.bool_)
    in_group[:, num_columns] = True
    num_equal: Int32s = in_group.argmax(axis=1).astype(np.int32)
    return num_equal


def _split(
    rows: Int64s, groups: Int64s, starts: Int32s, blocks: Int32s
) -> tuple[Int64s, Int32s, Int64s]:
    """Split groups of rows by their next KV block; returns rows by new group, starts and sizes.

    Groups of a single row are dropped.
    """
    keys = (groups << 32) | blocks
    order = keys.argsort(kind="stable")
    keys = keys[order]
    is_bound = np.ones(len(keys) + 1, dtype=np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=is_bound[1:-1])
    bounds = is_bound.nonzero()[0]
    sizes = bounds[1:] - bounds[:-1]
    is_group = sizes > 1
    order = order[is_group.repeat(sizes)]
    return rows[order], starts[order], sizes[is_group]


def _concatenate(pieces: list[Int32s] | list[Int64s]) -> Int32s:
    joined: Int32s = np.concatenate([_NONE, *pieces], dtype=np.int32)
    return joined


def _offsets(sizes: Int32s) -> Int32s:
    offsets = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGrouping:
    """Sharing plan of a step, for its first `num_rows` rows with `num_tokens` query tokens.

    `max_len` is the length of the longest of these rows.
    """

    plan: SharingPlan
    num_rows: int
    num_tokens: int
    max_len: int


class StepGrouper:
    """Groups the rows of each step by shared prefix, or decides that it uses vLLM's attention.

    There is one per set of layers with the same block table. `mode` may change between steps.
    """

    def __init__(
        self,
        *,
        mode: SharedPrefixMode,
        block_size: int,
        bytes_per_token: int,
        max_query_tokens: int,
        counts: Counters,
        unsupported: AttentionFallbackReason | None = None,
        crossover: Crossover | None = None,
        window: int | None = None,
        counts_rows: bool = False,
    ) -> None:
        """Create a grouper; `bytes_per_token` is the KV size of all its layers on this rank.

        `window` is the longest sliding window if all layers have one. Without a `crossover`, which
        may be set later, `auto` groups nothing. With `counts_rows` its costs are per row.
        """
        self.mode = mode
        self._planner = Planner(block_size)
        self._bytes_per_token = bytes_per_token
        self._max_query_tokens = max_query_tokens
        self._counts = counts
        self.unsupported = unsupported
        self.crossover = crossover
        self._counts_rows = counts_rows
        self._window = window

    def group_rows(
        self, table: Int32s, seq_lens: Int32s, query_starts: Int32s
    ) -> StepGrouping | None:
        """Group the rows of a step; None if the whole step uses vLLM's attention.

        The arrays are [rows, columns], [rows] and [rows + 1], on the host.
        """
        if self.mode == "off":
            return None
        grouping_or_reason = self.unsupported or self._decide(table, seq_lens, query_starts)
        if isinstance(grouping_or_reason, StepGrouping):
            self._counts.record_grouped(
                num_rows=num_grouped_rows(grouping_or_reason.plan),
                bytes_saved=self._bytes_per_token * num_tokens_saved(grouping_or_reason.plan),
            )
            return grouping_or_reason
        self._counts.record_skipped(grouping_or_reason)
        return None

    def _decide(
        self, table: Int32s, seq_lens: Int32s, query_starts: Int32s
    ) -> StepGrouping | AttentionFallbackReason:
        query_lens = np.diff(query_starts)
        num_rows = count_leading(query_lens <= self._max_query_tokens)
        if num_rows == 0:
            return "query_length"
        lens = seq_lens[:num_rows]
        max_len = int(lens.max())
        if self._window is not None and max_len > self._window:
            return "sliding_window"
        plan = self._planner.plan(table[:num_rows], lens - query_lens[:num_rows])
        if len(plan.node_tokens) == 0:
            return "nothing_shared"
        num_tokens = int(query_starts[num_rows])
        if self.mode == "auto":
            units = np.ones_like(query_lens) if self._counts_rows else query_lens
            work = StepWork.of(plan, lens, units[:num_rows])
            if self.crossover is None or not self.crossover.is_faster(work):
                return "not_worth_it"
        return StepGrouping(plan=plan, num_rows=num_rows, num_tokens=num_tokens, max_len=max_len)


def count_leading(wanted: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Number of True values at the start of a boolean array."""
    return len(wanted) if wanted.all() else int(wanted.argmin())


# Cached because a plan serves many steps.
@lru_cache(maxsize=4)
def num_grouped_rows(plan: SharingPlan) -> int:
    return int(np.count_nonzero(plan.suffix_starts))


@lru_cache(maxsize=4)
def num_tokens_saved(plan: SharingPlan) -> int:
    """Number of KV tokens that a step need not read, as shared nodes are read only once."""
    return int(((np.diff(plan.node_row_offsets) - 1) * plan.node_tokens).sum())
