"""A rank's share of an export under errors: a status word, never an exception."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.runtime.feature_guard import Feature
from engine.types.kv import ExportSlot, ExportStatus
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import COMMITTED, exported
from tests.fake_export import FORMAT

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BLOCK, NUM_BLOCKS, NUM_TOKENS = 32, 4, 40
FAILED = [ExportStatus.FAILED]


@pytest.fixture
def arena(tmp_path: Path) -> TestArena:
    return TestArena(tmp_path / "arena", FORMAT)


def cache_layout() -> Any:
    from engine.kv_transfer.cache_layout import CacheLayout

    return CacheLayout(
        group=0,
        layers=("layers.0", "layers.1"),
        num_kv_heads=FORMAT.num_kv_heads,
        head_dim=FORMAT.head_dim,
        dtype=torch.float32,
        block_size=BLOCK,
        num_ranks=1,
    )


def writer(guard: Feature, *, kernel_block: int = BLOCK) -> Any:
    """A writer over a cache of ones, except for zeros in the first block."""
    from engine.kv_transfer.worker.export_writer import ExportWriter

    layout = cache_layout()
    split = BLOCK // kernel_block
    shape = (NUM_BLOCKS * split, layout.num_kv_heads, kernel_block, 2 * layout.head_dim)
    caches = {name: torch.ones(shape) for name in layout.layers}
    for cache in caches.values():
        cache[:split] = 0
    export_writer = ExportWriter(layout, 0, guard)
    export_writer.register(caches)
    export_writer.prepare(
        {"layers.0": SimpleNamespace(isa="vec16" if kernel_block % 32 else "vec")}
    )
    return export_writer


def job(slot: ExportSlot, *block_ids: int, status: ExportStatus = ExportStatus.COMMITTED) -> Any:
    from engine.kv_transfer.jobs import ExportJob

    return ExportJob(target_slot=slot, block_ids=block_ids, status=status)


@pytest.mark.parametrize("kernel_block", [32, 16])
def test_blocks_are_written_in_the_order_of_the_prompt(arena: TestArena, kernel_block: int) -> None:
    """Also where kernel blocks are smaller than the scheduler's."""
    slot = arena.slot(NUM_TOKENS)
    export_writer = writer(Feature("kv"), kernel_block=kernel_block)
    export_writer.export(job(slot, 2, 0))
    kv = exported(arena, slot)
    assert (kv[:, :, :, :BLOCK] == 1).all() and (kv[:, :, :, BLOCK:] == 0).all()
    assert arena.words(slot) == COMMITTED
    export_writer.close()
    arena.check()


def test_mixed_version_prompt_gets_its_status_and_no_bytes(arena: TestArena) -> None:
    slot = arena.slot(NUM_TOKENS)
    writer(Feature("kv")).export(job(slot, 1, 2, status=ExportStatus.MIXED_VERSION))
    assert arena.words(slot) == [ExportStatus.MIXED_VERSION]
    assert arena.untouched(slot)


def test_slot_outside_the_arena_fails_and_the_next_is_written(arena: TestArena) -> None:
    slot, guard = arena.slot(NUM_TOKENS), Feature("kv")
    export_writer = writer(guard)
    export_writer.export(job(replace(slot, offset=len(arena.bytes) - 64), 1, 2))
    assert arena.words(slot) == FAILED
    export_writer.export(job(slot, 1, 2))
    assert arena.words(slot) == COMMITTED and guard.state.on
    arena.check()


def test_missing_arena_affects_nothing_else(arena: TestArena, tmp_path: Path) -> None:
    slot, guard = arena.slot(NUM_TOKENS), Feature("kv")
    export_writer = writer(guard)
    export_writer.export(job(replace(slot, arena=tmp_path / "gone"), 1, 2))
    export_writer.export(job(slot, 1, 2))
    assert arena.words(slot) == COMMITTED and guard.state.on


def test_failed_copy_disables_exports_and_reports_it(arena: TestArena) -> None:
    """A block ID that the cache does not have: no bytes, and FAILED from then on."""
    slots, guard = [arena.slot(NUM_TOKENS) for _ in range(2)], Feature("kv")
    export_writer = writer(guard)
    export_writer.export(job(slots[0], 1, 10**6))
    assert not guard.state.on
    export_writer.export(job(slots[1], 1, 2))
    assert [arena.words(slot) for slot in slots] == [FAILED] * 2
    assert arena.untouched(slots[1])
    arena.check()
