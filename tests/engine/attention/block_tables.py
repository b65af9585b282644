"""Block tables of trees of rows, and a reference search for their shared prefixes."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kernels.shared_prefix_attention.sharing_plan import Int32s, SharingPlan

BLOCK = 32

Path = tuple[int, ...]


@dataclass(frozen=True)
class Node:
    rows: tuple[int, ...]
    blocks: Path


def table_of(rows: Sequence[Sequence[int]], *, num_columns: int = 0) -> Int32s:
    """A block table of these rows. Unused columns hold stale values of an earlier request."""
    num_columns = max([num_columns, *map(len, rows)])
    table = np.full((len(rows), num_columns), 777, dtype=np.int32)
    for row, blocks in enumerate(rows):
        table[row, : len(blocks)] = blocks
    return table


def tree_rows(shape: Sequence[int], num_blocks: Sequence[int]) -> list[list[int]]:
    """Rows of block IDs that share prefixes as a tree does.

    `shape` (2, 3): two groups of three rows; `num_blocks` of each level's own part.
    """
    ids: Iterator[int] = itertools.count(1)
    paths: list[list[int]] = [[]]
    for branches, num in zip(shape, num_blocks, strict=True):
        paths = [[*path, *itertools.islice(ids, num)] for path in paths for _ in range(branches)]
    return paths


def reference_plan(table: Int32s, depths: Sequence[int]) -> tuple[set[Node], list[int]]:
    """Every path of blocks with its rows; paths that end with the same rows form one node."""
    rows_of: dict[Path, list[int]] = {}
    for row, depth in enumerate(depths):
        for length in range(1, depth + 1):
            rows_of.setdefault(tuple(table[row, :length].tolist()), []).append(row)
    shared = {path: tuple(rows) for path, rows in rows_of.items() if len(rows) > 1}
    nodes = set()
    for path, rows in shared.items():
        deeper = (p for p, r in shared.items() if r == rows and p[: len(path)] == path)
        if max(map(len, deeper)) == len(path):
            above = max(
                (len(p) for p in shared if path[: len(p)] == p and shared[p] != rows), default=0
            )
            nodes.add(Node(rows, path[above:]))
    ends = [
        max((len(path) for path, rows in shared.items() if row in rows), default=0)
        for row in range(len(depths))
    ]
    return nodes, ends


def nodes_of(plan: SharingPlan) -> list[Node]:
    return [
        Node(
            tuple(plan.node_rows[slice(*plan.node_row_offsets[i : i + 2])].tolist()),
            tuple(plan.node_blocks[slice(*plan.node_block_offsets[i : i + 2])].tolist()),
        )
        for i in range(len(plan.node_tokens))
    ]
