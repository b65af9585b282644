"""The planner equals a reference search, reuses valid plans, and never synchronizes a device."""

import sys
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.grouping import Planner
from kernels.shared_prefix_attention.sharing_plan import Int32s
from tests.engine.attention.block_tables import (
    BLOCK,
    Node,
    nodes_of,
    reference_plan,
    table_of,
    tree_rows,
)
from tests.sample_sizes import num_examples

MAX_CALLS = 350
"""At most 240 are counted; one more per row would be 256 more."""


def first_positions(rows: list[list[int]], depths: list[int] | None = None) -> Int32s:
    """First query positions of rows, each directly after this many full blocks."""
    full = [len(row) for row in rows] if depths is None else depths
    return np.array(full, dtype=np.int32) * BLOCK


def test_groups_of_any_size_and_order_share_equal_leading_blocks() -> None:
    rows = [[5, 6, 1], [9, 6, 2], [5, 6, 3], [8], [9, 6, 4], [5, 7]]
    plan = Planner(BLOCK).plan(table_of(rows), first_positions(rows))
    assert nodes_of(plan) == [Node((0, 2, 5), (5,)), Node((1, 4), (9, 6)), Node((0, 2), (6,))]
    assert plan.suffix_starts.tolist() == [64, 64, 64, 0, 64, 32]
    assert plan.node_tokens.tolist() == [32, 64, 32]


def test_row_does_not_share_a_block_that_holds_its_queries() -> None:
    rows = [[5, 6, 7], [5, 6, 7]]
    plan = Planner(BLOCK).plan(table_of(rows), np.array([94, 95], dtype=np.int32))
    assert nodes_of(plan) == [Node((0, 1), (5, 6))]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Rows of few block IDs, so that they agree, diverge, and agree again after the divergence."""
    rows = draw(st.lists(st.lists(st.integers(1, 3), max_size=7), max_size=9))
    return rows, [draw(st.integers(0, len(row))) for row in rows]


@settings(deadline=None, max_examples=num_examples(300))
@given(steps())
def test_plan_equals_the_reference_search(step: tuple[list[list[int]], list[int]]) -> None:
    rows, depths = step
    table = table_of(rows)
    plan = Planner(BLOCK).plan(table, first_positions(rows, depths))
    nodes, ends = reference_plan(table, depths)
    assert sorted(map(repr, nodes_of(plan))) == sorted(map(repr, nodes))
    assert (plan.suffix_starts // BLOCK).tolist() == ends
    assert plan.node_tokens.tolist() == [BLOCK * len(node.blocks) for node in nodes_of(plan)]


@settings(deadline=None, max_examples=num_examples(150))
@given(st.lists(steps(), min_size=2, max_size=6))
@pytest.mark.slow
def test_reused_plan_equals_a_new_one(
    followed: list[tuple[list[list[int]], list[int]]],
) -> None:
    planner = Planner(BLOCK)
    for rows, depths in followed:
        table, positions = table_of(rows, num_columns=7), first_positions(rows, depths)
        kept, anew = planner.plan(table, positions), Planner(BLOCK).plan(table, positions)
        assert nodes_of(kept) == nodes_of(anew)
        assert kept.suffix_starts.tolist() == anew.suffix_starts.tolist()


def test_growing_rows_keep_their_plan_and_changed_rows_do_not() -> None:
    planner, rows = Planner(BLOCK), tree_rows((2, 4), (3, 1))
    before = planner.plan(table_of(rows, num_columns=9), first_positions(rows))
    longer = [[*row, 50 + i] for i, row in enumerate(rows)]
    assert planner.plan(table_of(longer, num_columns=9), first_positions(longer)) is before
    left = longer[:3] + longer[4:]
    after = planner.plan(table_of(left, num_columns=9), first_positions(left))
    assert after is not before
    assert nodes_of(after)[0] == Node((0, 1, 2), (1, 2, 3))


def test_row_joins_a_deeper_shared_block_once_it_is_long_enough() -> None:
    planner, table = Planner(BLOCK), table_of([[1, 2, 3], [1, 2, 4], [1, 2, 3]])
    short = planner.plan(table, np.array([96, 40, 96], dtype=np.int32))
    assert nodes_of(short) == [Node((0, 1, 2), (1,)), Node((0, 2), (2, 3))]
    longer = planner.plan(table, np.array([96, 64, 96], dtype=np.int32))
    assert nodes_of(longer) == [Node((0, 1, 2), (1, 2)), Node((0, 2), (3,))]


def test_planning_uses_no_tensor() -> None:
    """A tensor computed on a device would require a synchronization."""

    class Refusing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: object, *_: object) -> None:
            raise AssertionError(f"the planner called {func}")

    rows = tree_rows((4, 2, 8), (4, 3, 1))
    with Refusing():
        plan = Planner(BLOCK).plan(table_of(rows), first_positions(rows))
    assert len(plan.node_tokens) == 12
    assert all(isinstance(getattr(plan, name), np.ndarray) for name in plan.__slots__)


@pytest.mark.parametrize(
    "shape, blocks",
    [((1, 256), (127, 3)), ((32, 8), (127, 3)), ((1, 8, 32), (32, 95, 3)), ((256,), (130,))],
)
def test_planning_takes_few_calls(shape: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    """Of 256 rows of 4096 tokens; the benchmark requires 200 us on a quiet machine.

    Calls are counted, because times depend on the machine.
    """
    rows = tree_rows(shape, blocks)
    order = np.random.default_rng(0).permutation(len(rows))
    table, positions = table_of([rows[i] for i in order], num_columns=512), first_positions(rows)
    planner = Planner(BLOCK)
    anew, same = (num_calls(lambda: planner.plan(table, positions)) for _ in range(2))
    assert anew < MAX_CALLS
    assert same < anew
    assert planner.num_plans == 1


def num_calls(run: Callable[[], object]) -> int:
    """Number of function calls, in Python and compiled."""
    events: Counter[str] = Counter()
    sys.setprofile(lambda _, event, __: events.update([event]))
    try:
        run()
    finally:
        sys.setprofile(None)
    return events["call"] + events["c_call"]
