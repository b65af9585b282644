"""Work list of the GPU attention kernel: a sharing plan as work items, at fixed addresses.

A CUDA graph replays with the pointers that it was captured with. All kernel inputs are therefore in
one tensor that is allocated once, for the largest step. `fill` writes a plan into it without a
device synchronization: the copy is from pinned memory, in stream order.

An item is the queries of some rows over a range of positions, for one thread block. Each item
writes one partial result per row, to an output slot of that row. The cut into items is vectorized
over nodes and rows, because it runs whenever a row joins or leaves.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.shared_prefix_attention.sharing_plan import Int32s, SharingPlan

ITEM_FIELDS = ("begin", "end", "blocks_at", "first_block", "rows_at", "num_rows")
OWN_BLOCKS = -1
"""Value of `blocks_at` for a suffix, which is read through its row's block table."""
OPEN_END = np.iinfo(np.int32).max
MIN_ITEM_TOKENS = 256
ITEM_ALIGNMENT = 64
"""Items are cut at multiples of this, in tokens from the start of the node or suffix."""


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
    """Work items of all shared nodes, and the offset in `node_rows` of each item's rows."""
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
    """Work items of all suffixes, and the row of each item.

    The last item of a row ends at `OPEN_END`.
    """
    num_splits = np.maximum(-(-suffix_tokens // step), 1)
    row = np.repeat(np.arange(len(suffix_tokens)), num_splits)
    split = _positions_within(num_splits)
    begin = plan.suffix_starts[row] + split * step
    end = np.where(split + 1 < num_splits[row], begin + step, OPEN_END)
    nothing, one = np.zeros_like(begin), np.ones_like(begin)
    fields = [begin, end, nothing + OWN_BLOCKS, nothing, nothing, one]
    return np.stack(fields, axis=1).astype(np.int32), row.astype(np.int32)


def _node_starts(plan: SharingPlan) -> NDArray[Any]:
    """Start position of each shared node: the number of tokens in its rows' preceding nodes."""
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
    """Ranges from 0 to each count, concatenated: [0, 1, .., counts[0] - 1, 0, 1, ..]."""
    before: NDArray[Any] = np.repeat(np.cumsum(counts) - counts, counts)
    within: NDArray[Any] = np.arange(len(before)) - before
    return within


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShape:
    """Dimensions of a work list's buffers, from the model, the scheduler's limits and the GPU."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    max_rows: int
    max_query_tokens: int
    max_node_blocks: int
    num_processors: int

    @property
    def ratio(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def queries_per_item(self) -> int:
        """Queries per work item, a power of two that fits the queries of at least one batch row.

        It is the number of rows of the kernel's matrix product.
        """
        one_row = self.max_query_tokens * self.ratio
        return max(64 if self.max_rows > 8 else 16, 1 << (one_row - 1).bit_length())

    @property
    def rows_per_item(self) -> int:
        return self.queries_per_item // (self.max_query_tokens * self.ratio)

    @property
    def target_items(self) -> int:
        """Work items per KV head: several per multiprocessor, to keep all of them equally busy."""
        return max(1, 4 * self.num_processors // self.num_kv_heads)

    @property
    def max_items(self) -> int:
        """Capacity in work items: a suffix per row, nodes of two rows each, and added splits."""
        return 3 * self.max_rows + 2 * self.target_items

    @property
    def max_slots(self) -> int:
        return 4 * self.max_rows + 2 * self.target_items * self.rows_per_item

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "num_items": 1,
            "num_rows": 1,
            "items": self.max_items * len(ITEM_FIELDS),
            "node_blocks": self.max_node_blocks,
            "item_rows": self.max_slots,
            "row_slots": self.max_slots,
            "row_slot_offsets": self.max_rows + 1,
        }


class WorkList:
    """Device buffers with the work list of one attention group, filled before each step.

    All layers of the group read them.
    """

    def __init__(self, shape: WorkShape, device: torch.device) -> None:
        self.shape = shape
        self._bounds = [0, *accumulate(shape.sizes.values())]
        size = self._bounds[-1]
        self._on_device = torch.zeros(size, dtype=torch.int32, device=device)
        # Double-buffered, so that a plan can be written while the previous one is being copied.
        self._on_host = [_StagingBuffer(size, device) for _ in range(2)]
        slots = (shape.max_slots, shape.max_query_tokens, shape.num_heads)
        self.outputs = torch.empty(*slots, shape.head_size, dtype=torch.float32, device=device)
        self.lses = torch.empty(slots, dtype=torch.float32, device=device)

    def __getitem__(self, name: str) -> Tensor:
        """Device tensor of the list with this name in `WorkShape.sizes`."""
        i = list(self.shape.sizes).index(name)
        return self._on_device[self._bounds[i] : self._bounds[i + 1]]

    def fill(self, plan: SharingPlan, suffix_tokens: Int32s) -> bool:
        """Copy the work items of a plan to the device buffers; returns False if they do not fit.

        `suffix_tokens` only determines the number of splits per row. Tokens that a suffix gains
        later are read as well.
        """
        cut = split_into_items(
            plan,
            suffix_tokens,
            block_size=self.shape.block_size,
            rows_per_item=self.shape.rows_per_item,
            target_items=self.shape.target_items,
        )
        lists = self._lists(plan, cut)
        if any(len(lists[name]) > size for name, size in self.shape.sizes.items()):
            return False
        self._on_host.reverse()
        self._on_host[0].send(
            [lists[name] for name in self.shape.sizes], self._bounds, self._on_device
        )
        return True

    def _lists(self, plan: SharingPlan, cut: WorkItems) -> dict[str, Int32s]:
        return {
            "num_items": np.array([len(cut.items)], np.int32),
            "num_rows": np.array([len(plan.suffix_starts)], np.int32),
            "items": cut.items.ravel(),
            "node_blocks": plan.node_blocks,
            "item_rows": cut.item_rows,
            "row_slots": cut.row_slots,
            "row_slot_offsets": cut.row_slot_offsets,
        }


class _StagingBuffer:
    """Pinned host buffer from which a work list is copied to the device, with the copy's event."""

    def __init__(self, size: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def send(self, lists: list[Int32s], bounds: list[int], to: Tensor) -> None:
        if self._copied is not None:
            self._copied.synchronize()  # the copy before the last one, so it rarely blocks
        memory = self._memory.numpy()
        for values, begin in zip(lists, bounds, strict=False):
            memory[begin : begin + len(values)] = values
        to.copy_(self._memory, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
