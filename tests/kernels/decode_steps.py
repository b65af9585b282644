"""Decode steps whose rows share prefixes, as trees, with their sharing plans.

A tree is a list of levels, from the root down, as in Hydragen's tests: [[7, 7], [9, 10, 11, 4]] is
two prompts of 7 tokens, each with two rows of their own length. A level's entries are assigned to
those above it in equal runs; the last level is the rows' suffixes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from kernels.shared_prefix_attention.sharing_plan import SharingPlan
from tests.kernels.attention_reference import Step

Levels = Sequence[Sequence[int]]

HYDRAGEN: list[Levels] = [
    [[1], [10]],
    [[3], [6, 6]],
    [[7, 7], [9, 10, 11, 4], [129, 2, 3, 4, 5, 6, 7, 128]],
    [[16384], [1, 128, 256]],
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Shape of a model's attention and of its KV cache."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Positions [begin, end) of the rows."""

    begin: int
    end: int
    rows: range


def nodes_of(levels: Levels) -> list[Node]:
    """Nodes of all levels but the last, parents before children, without empty ones."""
    num_rows = len(levels[-1])
    nodes: list[Node] = []
    begins = [0] * num_rows
    for level in levels[:-1]:
        width = num_rows // len(level)
        assert width * len(level) == num_rows
        for i, tokens in enumerate(level):
            rows = range(i * width, (i + 1) * width)
            begin = begins[rows[0]]
            if tokens:
                nodes.append(Node(begin=begin, end=begin + tokens, rows=rows))
            begins[rows.start : rows.stop] = [begin + tokens] * width
    return nodes


def step_of(
    levels: Levels, shape: Shape, *, query_tokens: Sequence[int] | int = 1, seed: int = 0
) -> tuple[SharingPlan, Step]:
    """A step in float64 and its plan. Blocks are in random order; unwritten values are NaN.

    A block entirely inside a node is shared by all of its rows; of other blocks every row has its
    own, with a copy of the shared tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    nodes = nodes_of(levels)
    starts = [
        max([n.end for n in nodes if row in n.rows], default=0) for row in range(len(levels[-1]))
    ]
    lengths = [start + suffix for start, suffix in zip(starts, levels[-1], strict=True)]
    table, num_blocks = _blocks(nodes, lengths, shape.block_size, generator)
    size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size)
    keys, values = (torch.full(size, torch.nan, dtype=torch.float64) for _ in range(2))
    pieces = [
        *nodes,
        *(
            Node(begin=s, end=e, rows=range(r, r + 1))
            for r, (s, e) in enumerate(zip(starts, lengths, strict=True))
        ),
    ]
    for piece in pieces:
        positions = torch.arange(piece.begin, piece.end)
        for cache in (keys, values):
            content = torch.randn(
                len(positions), *size[2:], generator=generator, dtype=torch.float64
            )
            for row in piece.rows:
                at = table[row, positions // shape.block_size].long()
                cache[at, positions % shape.block_size] = content
    counts = [query_tokens] * len(lengths) if isinstance(query_tokens, int) else query_tokens
    num_tokens = sum(counts)
    query = torch.randn(
        num_tokens, shape.num_heads, shape.head_size, generator=generator, dtype=torch.float64
    )
    step = Step(
        query=query,
        keys=keys,
        values=values,
        block_table=table,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        scale=shape.head_size**-0.5,
    )
    return plan_of(nodes, starts, table, shape.block_size), step


def plan_of(
    nodes: Sequence[Node], starts: Sequence[int], table: Tensor, block_size: int
) -> SharingPlan:
    blocks = [
        table[n.rows[0], n.begin // block_size : -(-n.end // block_size)].tolist() for n in nodes
    ]
    return SharingPlan(
        node_blocks=_int32(block for run in blocks for block in run),
        node_block_offsets=_int32([0, *accumulate(map(len, blocks))]),
        node_tokens=_int32(n.end - n.begin for n in nodes),
        node_rows=_int32(row for n in nodes for row in n.rows),
        node_row_offsets=_int32([0, *accumulate(len(n.rows) for n in nodes)]),
        suffix_starts=_int32(starts),
    )


def nothing_shared(num_rows: int) -> SharingPlan:
    """The plan of rows that have nothing in common."""
    return plan_of([], [0] * num_rows, torch.empty(0, 0), 1)


def rounded(step: Step, dtype: torch.dtype) -> Step:
    """The step with values rounded to a cache dtype, in float64."""
    return replace(
        step,
        query=step.query.to(dtype).double(),
        keys=step.keys.to(dtype).double(),
        values=step.values.to(dtype).double(),
    )


def _int32(values: object) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(list(values), dtype=np.int32)  # type: ignore[call-overload]


def _blocks(
    nodes: Sequence[Node], lengths: Sequence[int], block_size: int, generator: torch.Generator
) -> tuple[Tensor, int]:
    width = max(-(-length // block_size) for length in lengths) or 1
    owner: dict[tuple[int, int], int] = {}
    ids: dict[object, int] = {}
    for number, node in enumerate(nodes):
        for block in range(-(-node.begin // block_size), node.end // block_size):
            owner |= {(row, block): number for row in node.rows}
    keys = [
        [(owner.get((row, block), ~row), block) for block in range(width)]
        for row in range(len(lengths))
    ]
    for row in keys:
        for key in row:
            ids.setdefault(key, len(ids))
    places = torch.randperm(len(ids), generator=generator, dtype=torch.int32)
    table = places[torch.tensor([[ids[key] for key in row] for row in keys])]
    return table, len(ids)
