"""Decode steps whose samples share prefixes in a regular tree, as inputs of attention kernels."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.shared_prefix_attention.sharing_plan import Int32s, SharingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Regular tree of prefixes that the samples (rows) of a decode step share.

    `levels`, from the root: the number of children of each node above, and the tokens per child.
    """

    levels: tuple[tuple[int, int], ...]
    rows_per_leaf: int
    suffix: int
    """Unshared tokens per row."""

    @property
    def widths(self) -> list[int]:
        """Number of nodes of each level of the prefix tree."""
        return list(accumulate((width for width, _ in self.levels), lambda a, b: a * b))

    @property
    def num_rows(self) -> int:
        return (self.widths or [1])[-1] * self.rows_per_leaf

    @property
    def depth(self) -> int:
        """Number of tokens of each row that are shared with other rows."""
        return sum(tokens for _, tokens in self.levels)

    @property
    def length(self) -> int:
        return self.depth + self.suffix

    @property
    def ratio(self) -> float:
        """Attended tokens divided by distinct tokens, which bounds the speedup by sharing."""
        pairs = zip(self.widths, self.levels, strict=True)
        unique = sum(width * tokens for width, (_, tokens) in pairs) + self.num_rows * self.suffix
        return self.num_rows * self.length / unique

    def laid_out(self, block: int, generator: torch.Generator) -> tuple[SharingPlan, Tensor]:
        """Sharing plan and block table [rows, width] of the step, with randomly placed blocks."""
        runs = [
            (width, tokens // block, tokens)
            for width, (_, tokens) in zip(self.widths, self.levels, strict=True)
        ]
        own = -(-self.suffix // block)
        num_blocks = sum(width * length for width, length, _ in runs) + self.num_rows * own
        blocks = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
        columns, nodes = [], []
        for width, length, tokens in runs:
            level, blocks = blocks[: width * length].view(width, length), blocks[width * length :]
            rows = np.arange(self.num_rows, dtype=np.int32).reshape(width, -1)
            columns.append(level.repeat_interleave(rows.shape[1], dim=0))
            nodes += [(level[i].numpy(), tokens, rows[i]) for i in range(width)]
        columns.append(blocks.view(self.num_rows, own))
        plan = SharingPlan(
            node_blocks=_joined([run for run, _, _ in nodes]),
            node_block_offsets=_offsets([len(run) for run, _, _ in nodes]),
            node_tokens=np.array([tokens for _, tokens, _ in nodes], np.int32),
            node_rows=_joined([rows for _, _, rows in nodes]),
            node_row_offsets=_offsets([len(rows) for _, _, rows in nodes]),
            suffix_starts=np.full(self.num_rows, self.depth, np.int32),
        )
        return plan, torch.cat(columns, dim=1).contiguous()


def _joined(runs: list[Int32s]) -> Int32s:
    joined: Int32s = np.concatenate([np.empty(0, np.int32), *runs])
    return joined


def _offsets(lengths: list[int]) -> Int32s:
    return np.array([0, *accumulate(lengths)], np.int32)
