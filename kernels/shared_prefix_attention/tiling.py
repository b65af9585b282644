"""Tiling of a plan into items: queries of some rows over a range of positions, per thread block.

Each item writes one partial result per row, to an output slot of that row. The code is vectorized
over nodes and rows, because it runs whenever a row joins or leaves.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.shared_prefix_attention.plan import Int32s, SharingPlan

ITEM_FIELDS = ("begin", "end", "blocks_at", "first_block", "rows_at", "num_rows")
OWN_BLOCKS = -1
"""Value of `blocks_at` for a suffix, which is read through its row's block table."""
OPEN_END = np.iinfo(np.int32).max
MIN_ITEM_TOKENS = 256
ITEM_ALIGNMENT = 64
"""Items are cut at multiples of it, relative to the start of the node or suffix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItems:
    items: Int32s
    """[items, len(ITEM_FIELDS)]"""
    item_rows: Int32s
    """Concatenated rows of all items; an index into it is the number of the output slot."""
    row_slots: Int32s
    row_slot_offsets: Int32s


def split_into_items(
    plan: SharingPlan,
    suffix_tokens: Int32s,
    *,
    block_size: int,
    rows_per_item: int,
    target_items: int,
) -> WorkItems:
    sizes = np.diff(plan.node_row_offsets)
    num_chunks = -(-sizes // rows_per_item)
    total = int(plan.node_tokens @ num_chunks) + int(suffix_tokens.sum())
    step = max(MIN_ITEM_TOKENS, -(-total // (target_items * ITEM_ALIGNMENT)) * ITEM_ALIGNMENT)
    shared, rows_from = _node_items(plan, num_chunks, step, block_size, rows_per_item)
    own, own_rows = _suffix_items(plan, suffix_tokens, step)
    num_rows = shared[:, ITEM_FIELDS.index("num_rows")]
    node_rows = plan.node_rows[np.repeat(rows_from, num_rows) + _positions_within(num_rows)]
    items, item_rows = np.concatenate([shared, own]), np.concatenate([node_rows, own_rows])
    num_rows = items[:, ITEM_FIELDS.index("num_rows")]
    items[:, ITEM_FIELDS.index("rows_at")] = np.cumsum(num_rows) - num_rows
    counts = np.bincount(item_rows, minlength=len(plan.suffix_starts))
    return WorkItems(
        items=items,
        item_rows=item_rows,
        row_slots=np.argsort(item_rows, kind="stable").astype(np.int32),
        row_slot_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
    )


def _node_items(
    plan: SharingPlan, num_chunks: NDArray[Any], step: int, block_size: int, rows_per_item: int
) -> tuple[Int32s, Int32s]:
    """Items of all nodes, and the offset in `node_rows` of each item's rows."""
    num_splits = -(-plan.node_tokens // step)
    node = np.repeat(np.arange(len(plan.node_tokens)), num_chunks * num_splits)
    chunk, split = np.divmod(
        _positions_within(num_chunks * num_splits), np.maximum(num_splits, 1)[node]
    )
    node_begin = _node_starts(plan)[node]
    begin = node_begin + split * step
    end = np.minimum(begin + step, node_begin + plan.node_tokens[node])
    first_row = chunk * rows_per_item
    num_rows = np.minimum(rows_per_item, np.diff(plan.node_row_offsets)[node] - first_row)
    fields = [begin, end, plan.node_block_offsets[node], node_begin // block_size, node, num_rows]
    rows_from = plan.node_row_offsets[node] + first_row
    return np.stack(fields, axis=1).astype(np.int32), rows_from.astype(np.int32)


def _suffix_items(plan: SharingPlan, suffix_tokens: Int32s, step: int) -> tuple[Int32s, Int32s]:
    """Items of all suffixes, and the row of each. The last item of a row ends at `OPEN_END`."""
    num_splits = np.maximum(-(-suffix_tokens // step), 1)
    row = np.repeat(np.arange(len(suffix_tokens)), num_splits)
    split = _positions_within(num_splits)
    begin = plan.suffix_starts[row] + split * step
    end = np.where(split + 1 < num_splits[row], begin + step, OPEN_END)
    nothing, one = np.zeros_like(begin), np.ones_like(begin)
    fields = [begin, end, nothing + OWN_BLOCKS, nothing, nothing, one]
    return np.stack(fields, axis=1).astype(np.int32), row.astype(np.int32)


def _node_starts(plan: SharingPlan) -> NDArray[Any]:
    """Start position of each node: the tokens of the preceding nodes of any of its rows."""
    node = np.repeat(np.arange(len(plan.node_tokens)), np.diff(plan.node_row_offsets))
    by_row = np.argsort(plan.node_rows, kind="stable")
    tokens = plan.node_tokens[node[by_row]]
    before = np.cumsum(tokens) - tokens
    row = plan.node_rows[by_row]
    first = np.searchsorted(row, row)
    begins = np.zeros(len(plan.node_tokens), np.int64)
    begins[node[by_row]] = before - before[first]
    return begins


def _positions_within(counts: NDArray[Any]) -> NDArray[Any]:
    """[0, 1, .., counts[0] - 1, 0, 1, ..]"""
    before: NDArray[Any] = np.repeat(np.cumsum(counts) - counts, counts)
    within: NDArray[Any] = np.arange(len(before)) - before
    return within
