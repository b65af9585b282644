"""What a step computes over blocks that nothing was loaded into is not exported."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engine.guard import feature
from engine.kv.form import CacheForm
from engine.kv.loader import Loader

FORM = CacheForm(
    group=0,
    layers=("layer",),
    num_kv_heads=1,
    head_dim=16,
    dtype=torch.float32,
    block_size=16,
    num_ranks=1,
)


def test_a_step_whose_load_failed_says_so_once(tmp_path: Path) -> None:
    loader = Loader(FORM, 0, feature("a test's segments"))
    loader.register({"layer": torch.zeros(4, 1, 16, 32)})
    source = SimpleNamespace(arena=str(tmp_path / "gone"), offset=0, num_tokens=16)
    job: Any = SimpleNamespace(
        pieces=[SimpleNamespace(source=source, skip=0, num_tokens=16, shift=0)],
        block_ids=(1, 2),
        num_tokens=16,
    )
    assert not loader.take_step_failed()
    loader.load(job)
    assert loader.take_failed() == {1, 2}
    assert loader.take_step_failed()
    assert not loader.take_step_failed()
