"""Work list of the GPU kernel: a tiled plan in device buffers with fixed addresses and sizes.

A CUDA graph replays with the pointers that it was captured with. All kernel inputs are therefore in
one tensor that is allocated once, for the largest step. `fill` writes a plan into it without a
device synchronization: the copy is from pinned memory, in stream order.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.shared_prefix_attention.plan import Int32s, SharingPlan
from kernels.shared_prefix_attention.tiling import ITEM_FIELDS, WorkItems, split_into_items


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShape:
    """Buffer sizes, derived from the model, the scheduler's limits and the GPU."""

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
        """Rows of the matrix product, a power of two that fits the queries of at least one row."""
        one_row = self.max_query_tokens * self.ratio
        return max(64 if self.max_rows > 8 else 16, 1 << (one_row - 1).bit_length())

    @property
    def rows_per_item(self) -> int:
        return self.queries_per_item // (self.max_query_tokens * self.ratio)

    @property
    def target_items(self) -> int:
        """Items per KV head: several per multiprocessor, so that they finish at the same time."""
        return max(1, 4 * self.num_processors // self.num_kv_heads)

    @property
    def max_items(self) -> int:
        """Capacity: a suffix per row, nodes of two rows each at some depth, and added splits."""
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
    """Buffers of one attention group, filled before a step and read by all its layers."""

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
        """Device tensor of one list in `WorkShape.sizes`."""
        i = list(self.shape.sizes).index(name)
        return self._on_device[self._bounds[i] : self._bounds[i + 1]]

    def fill(self, plan: SharingPlan, suffix_tokens: Int32s) -> bool:
        """Write a plan to the device; returns False if it does not fit.

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
    """Pinned host buffer of one plan, with the event of its last copy."""

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
