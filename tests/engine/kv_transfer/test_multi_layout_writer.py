"""Exports of prompts with several cache layouts: one status, and every region in its place."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.runtime.feature_guard import Feature
from engine.types.kv import ExportSlot, ExportStatus, KvFormat
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import COMMITTED, PENDING

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

BLOCK, WINDOW, NUM_TOKENS = 32, 20, 70
FAILED = [ExportStatus.FAILED]


def layouts() -> Any:
    """A layer with all tokens, and one with a window and larger blocks of fewer heads."""
    from engine.kv_transfer.cache_layout import CacheLayout

    common: Any = {"dtype": torch.float32, "num_ranks": 1, "head_dim": 32}
    full = CacheLayout(group=0, layers=("l.0",), num_kv_heads=2, block_size=BLOCK, **common)
    windowed = CacheLayout(
        group=1, layers=("l.1",), num_kv_heads=1, block_size=2 * BLOCK, window=WINDOW, **common
    )
    return full, windowed


@pytest.fixture
def arena(tmp_path: Path) -> TestArena:
    from engine.kv_transfer.worker.export_setup import layer_formats

    formats = layer_formats(layouts())
    return TestArena(tmp_path / "arena", KvFormat.of_layers(formats, dtype="float32", rope={}))


def writer(guard: Feature) -> Any:
    """A writer over caches whose blocks contain their own number; `l.1` adds 10."""
    from engine.kv_transfer.worker.multi_layout_writer import PromptWriter

    numbers = torch.arange(4.0).view(-1, 1, 1, 1)
    prompt_writer = PromptWriter(layouts(), 0, guard)
    prompt_writer.register(
        {
            "l.0": numbers.repeat(1, 2, BLOCK, 64),
            "l.1": 10 + numbers.repeat(1, 1, 2 * BLOCK, 64),
        }
    )
    prompt_writer.prepare({name: SimpleNamespace(isa="vec") for name in ("l.0", "l.1")})
    return prompt_writer


def planner(**options: Any) -> Any:
    from engine.kv_transfer.core.export_planner import ExportPlanner

    names: list[str] = []
    return ExportPlanner(layouts(), on_exported=names.append, **options)


def planned(slot: ExportSlot, *block_ids: list[int]) -> Any:
    """The export of a step that prefills a prompt with these blocks of each KV cache group."""
    blocks = SimpleNamespace(get_block_ids=lambda _: block_ids)
    prompts = SimpleNamespace(req_id="a", num_computed_tokens=0)
    export_planner = planner()
    export_planner.add("a", slot)
    (export,) = export_planner.plan(
        SimpleNamespace(
            scheduled_new_reqs=[prompts],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], num_computed_tokens=[], resumed_req_ids=set()
            ),
            num_scheduled_tokens={"a": slot.num_tokens},
            kv_connector_block_state=blocks,
        )
    )
    return export


def test_every_layer_has_its_own_tokens(arena: TestArena) -> None:
    """The window of the query at position 70 begins at token 51, in the first large block."""
    slot = arena.slot(NUM_TOKENS)
    export_writer = writer(Feature("kv"))
    export_writer.export(planned(slot, [3, 1, 2], [2, 1]))
    data = arena.data(slot).view(np.float32)
    full = data[: 2 * 2 * NUM_TOKENS * 32].reshape(2, 2, NUM_TOKENS, 32)
    windowed = data[full.size :].reshape(2, 1, NUM_TOKENS, 32)
    assert [np.unique(full[:, :, t]).tolist() for t in (0, 31, 32, 64)] == [[3], [3], [1], [2]]
    assert [np.unique(windowed[:, :, t]).tolist() for t in (0, 63, 64)] == [[12], [12], [11]]
    assert arena.words(slot) == COMMITTED
    export_writer.close()
    arena.check()


def test_blocks_before_the_window_are_left_out(arena: TestArena) -> None:
    slot = arena.slot(90)  # the window begins at token 71, in the second large block
    export_writer = writer(Feature("kv"))
    export_writer.export(planned(slot, [1, 2, 3], [0, 3]))
    windowed = arena.data(slot).view(np.float32)[2 * 2 * 90 * 32 :]
    assert windowed.size == 2 * (90 - 64) * 32
    assert np.unique(windowed).tolist() == [13]
    assert arena.words(slot) == COMMITTED


def test_block_that_vllm_has_freed_fails_the_export(arena: TestArena) -> None:
    slot = arena.slot(NUM_TOKENS)
    writer(Feature("kv")).export(planned(slot, [1, 2, 3], [0, 3]))
    assert arena.words(slot) == FAILED
    assert arena.untouched(slot)


def test_status_is_written_after_the_last_region_and_is_the_worst(arena: TestArena) -> None:
    slot = arena.slot(NUM_TOKENS)
    export_writer, export = writer(Feature("kv")), planned(slot, [1, 2, 3], [1, 2])
    (full, windowed), (first, second) = export_writer.jobs(export), export_writer.writers
    first.export(replace(full, target_slot=replace(full.target_slot, offset=2**30)))
    assert arena.words(slot) == PENDING
    second.export(windowed)
    assert arena.words(slot) == FAILED
    export_writer.export(export)
    assert arena.words(slot) == COMMITTED


def test_failed_step_fails_the_prompt_once(arena: TestArena) -> None:
    slot = arena.slot(NUM_TOKENS)
    writer(Feature("kv")).fail(planned(slot, [1, 2, 3], [1, 2]))
    assert arena.words(slot) == FAILED
    assert arena.untouched(slot)


def test_status_that_cannot_be_written_is_not_mixed_with_the_next_export(arena: TestArena) -> None:
    slot = arena.slot(NUM_TOKENS)
    export_writer, export = writer(Feature("kv")), planned(slot, [1, 2, 3], [1, 2])
    outside = replace(slot, status_offset=2**30)
    export_writer.export(replace(export, target_slot=outside, status=ExportStatus.FAILED))
    [statuses] = {writer._statuses for writer in export_writer.writers}
    assert statuses._known == {}
    export_writer.export(export)
    assert arena.words(slot) == COMMITTED
