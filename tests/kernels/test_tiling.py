"""Division of a plan into items: each position of each row once, whatever is shared."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kernels.shared_prefix_attention.gpu_work_list import (
    ITEM_FIELDS,
    OPEN_END,
    OWN_BLOCKS,
    split_into_items,
)
from tests.kernels.decode_steps import Levels, Shape, step_of
from tests.kernels.tree_strategies import Drawn, random_values


def covered(levels: Levels, shape: Shape, *, rows_per_item: int, target_items: int) -> None:
    plan, step = step_of(levels, shape)
    lengths = step.seq_lens.numpy()
    cut = split_into_items(
        plan,
        lengths - plan.suffix_starts,
        block_size=shape.block_size,
        rows_per_item=rows_per_item,
        target_items=target_items,
    )
    seen = [np.zeros(length, dtype=np.int64) for length in lengths]
    slots: list[list[int]] = [[] for _ in lengths]
    for item in cut.items:
        begin, end, blocks_at, first_block, rows_at, num_rows = map(int, item)
        assert 1 <= num_rows <= rows_per_item
        for slot in range(rows_at, rows_at + num_rows):
            row = int(cut.item_rows[slot])
            slots[row].append(slot)
            seen[row][begin:end] += 1
            if blocks_at == OWN_BLOCKS:
                assert num_rows == 1
                continue
            position = np.arange(begin, end)
            number, offset = np.divmod(position, shape.block_size)
            shared = plan.node_blocks[blocks_at + number - first_block]
            own = step.block_table[row].numpy()[number]
            assert torch.equal(step.keys[shared, offset], step.keys[own, offset])
    assert all((row == 1).all() for row in seen)
    for row, mine in enumerate(slots):
        a, b = cut.row_slot_offsets[row : row + 2]
        assert sorted(cut.row_slots[a:b]) == mine


@settings(deadline=None, max_examples=20)
@given(random_values(head_sizes=(32,), longest=900))
@pytest.mark.slow
def test_items_cover_every_position_of_every_row_once(case: Drawn) -> None:
    covered(case.levels, case.shape, rows_per_item=3, target_items=16)


@pytest.mark.parametrize("target_items", [1, 7, 1000])
def test_more_items_are_made_on_request(target_items: int) -> None:
    covered([[5000], [700, 10]], Shape(), rows_per_item=8, target_items=target_items)


def test_suffix_may_outgrow_its_plan() -> None:
    plan, _ = step_of([[64], [3, 700]], Shape())
    cut = split_into_items(
        plan, np.array([3, 700], np.int32), block_size=32, rows_per_item=8, target_items=100
    )
    ends = cut.items[:, ITEM_FIELDS.index("end")].tolist()
    assert ends == [64, OPEN_END, 320, 576, OPEN_END]
