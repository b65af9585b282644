"""Blocks of exports that are read while later steps run, with vLLM's block pool."""

from collections import Counter
from pathlib import Path
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from engine.kv_transfer.core.export_planner import HeldBlocks
from engine.kv_transfer.jobs import EndedExports, PromptExport
from engine.types.kv import ExportSlot, ExportStatus


def pool_of(num_blocks: int = 8) -> Any:
    return BlockPool(num_blocks, enable_caching=True, hash_block_size=16)


def export_of(*groups: tuple[int, ...]) -> PromptExport:
    slot = ExportSlot(arena=Path("a"), offset=0, status_offset=0, num_tokens=1)
    return PromptExport(
        target_slot=slot, block_ids=dict(enumerate(groups)), status=ExportStatus.COMMITTED
    )


def test_blocks_are_free_when_all_ranks_have_read_them() -> None:
    pool, held = pool_of(), HeldBlocks(2)
    held.bind(pool)
    blocks = pool.get_new_blocks(3)
    ids = tuple(block.block_id for block in blocks)
    export = held.hold(export_of(ids, (0, *ids)))  # of two groups, with a block that vLLM freed
    assert export.number is not None and held
    pool.free_blocks(blocks)  # the request has finished
    assert pool.get_num_free_blocks() == 4
    report = EndedExports(num_ranks=Counter({export.number: 1}))
    held.on_ended(report.num_ranks)
    assert held and pool.get_num_free_blocks() == 4
    held.on_ended(report.num_ranks)
    assert not held and pool.get_num_free_blocks() == 7


def test_reports_of_ranks_are_added() -> None:
    pool, held = pool_of(), HeldBlocks(2)
    held.bind(pool)
    first, second = (held.hold(export_of((block.block_id,))) for block in pool.get_new_blocks(2))
    numbers: Any = (first.number, second.number)
    one = EndedExports(num_ranks=Counter(numbers))
    other = EndedExports(num_ranks=Counter(numbers[:1]))
    held.on_ended(one.aggregate(other).num_ranks)
    assert held
    held.on_ended({numbers[1]: 1})
    assert not held and all(block.ref_cnt <= 1 for block in pool.blocks)


def test_no_free_block_is_expected_from_an_export_of_a_running_request() -> None:
    pool, held = pool_of(), HeldBlocks(1)
    held.bind(pool)
    blocks = pool.get_new_blocks(2)
    held.hold(export_of(tuple(block.block_id for block in blocks)))
    assert held and not held.has_pending_frees  # vLLM preempts a request instead of waiting
    pool.free_blocks(blocks[:1])
    assert held.has_pending_frees
