"""A step over blocks whose load failed is not exported."""

from pathlib import Path

import torch

from engine.kv_transfer.cache_layout import CacheLayout
from engine.kv_transfer.jobs import LoadJob
from engine.kv_transfer.worker.loader import Loader
from engine.runtime.feature_guard import feature
from engine.types.kv import ExportSlot, LoadPiece

FORM = CacheLayout(
    group=0,
    layers=("layer",),
    num_kv_heads=1,
    head_dim=16,
    dtype=torch.float32,
    block_size=16,
    num_ranks=1,
)


def test_step_with_a_failed_load_reports_it_once(tmp_path: Path) -> None:
    loader = Loader(FORM, 0, feature("KV reuse of this test"))
    loader.register({"layer": torch.zeros(4, 1, 16, 32)})
    gone = ExportSlot(arena=tmp_path / "gone", offset=0, status_offset=0, num_tokens=20)
    piece = LoadPiece(source=gone, token_offset=0, num_tokens=20, start=16, shift=0)
    job = LoadJob(pieces=(piece,), block_ids=(1, 2))
    assert not loader.take_step_failed()
    loader.load(job)
    assert loader.take_failed_blocks() == {1, 2}
    assert loader.take_step_failed()
    assert not loader.take_step_failed()
