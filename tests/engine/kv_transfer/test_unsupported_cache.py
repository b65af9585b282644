"""A model whose cache has more than keys and values is served normally, without exports."""

from pathlib import Path

import pytest

from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import EXPORTING, PENDING, kv_format, save_model
from tests.engine.stepped_engine import live_engine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def test_quantized_cache_is_refused_with_a_reason(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "mistral", num_kv_heads=2, sliding_window=None)
    arena = TestArena(tmp_path / "arena", kv_format(2))
    slot = arena.slot(99)
    settings = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
    with live_engine(model, **EXPORTING, **settings) as engine:
        (reason,) = engine.rpc("coppice_prepare_kv_export")
        assert reason.startswith("UnsupportedCache: model.layers.0.self_attn.attn")
        assert "the model's dtype is torch.bfloat16" in reason
        (answer,) = engine.finish(engine.submit(list(range(100)), export=slot, max_tokens=4))
        assert engine.rpc("coppice_flush_exports") == [True]
    assert len(answer.token_ids) == 4
    assert arena.words(slot) == PENDING
    assert arena.untouched(slot)
