"""Model families on the real engine: exact logprobs, weights updates, and what each supports.

docs/reference/model-features.md is the table of these results.
"""

from pathlib import Path

import pytest

from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import COMMITTED, EXPORTING, exported, reference_kv
from tests.engine.kv_transfer.export_models import kv_format as export_format
from tests.engine.model_families import COMMON, save_family
from tests.engine.seedling import reference, teacher_forced
from tests.engine.stepped_engine import LiveEngine, live_engine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
PROMPT = [5 + i * 7 % 200 for i in range(100)]  # longer than the sliding windows
TOLERANCE = 1e-4
SERVED = ("mixture_of_experts", "sliding_window", "alternating_windows")


def largest_error(engine: LiveEngine, model: Path) -> float:
    """Largest difference of a sample's logprobs from those of transformers."""
    (answer,) = engine.ask(PROMPT, max_tokens=16, temperature=1.0)
    expected = teacher_forced(reference(model), PROMPT, answer.token_ids)
    return max(abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True))


@pytest.mark.parametrize("family", SERVED)
def test_logprobs_are_exact_before_and_after_a_weights_update(family: str, tmp_path: Path) -> None:
    first = save_family(tmp_path / "v1", family)
    second = save_family(tmp_path / "v2", family, seed=6)
    with live_engine(first) as engine:
        assert largest_error(engine, first) < TOLERANCE
        engine.swap(second)
        assert largest_error(engine, second) < TOLERANCE


def test_prompt_kv_of_a_mixture_of_experts_is_that_of_transformers(tmp_path: Path) -> None:
    model = save_family(tmp_path / "model", "mixture_of_experts")
    form = export_format(COMMON["num_key_value_heads"], head_dim=COMMON["head_dim"])
    arena = TestArena(tmp_path / "arena", form)
    slot = arena.slot(len(PROMPT) - 1)
    with live_engine(model, **EXPORTING) as engine:
        (answer,) = engine.rpc("coppice_prepare_kv_export")
        assert isinstance(answer, dict) and answer["not_movable"] is None
        engine.finish(engine.submit(PROMPT, export=slot, max_tokens=2))
        engine.rpc("coppice_flush_exports")
    assert arena.words(slot) == COMMITTED
    truth = reference_kv(reference(model), PROMPT, slot.num_tokens)
    assert float((exported(arena, slot) - truth).abs().max()) < TOLERANCE


@pytest.mark.parametrize("family", ["sliding_window", "alternating_windows"])
def test_prompt_kv_of_sliding_windows_is_refused_with_the_reason(
    family: str, tmp_path: Path
) -> None:
    model = save_family(tmp_path / "model", family)
    with live_engine(model, **EXPORTING) as engine:
        (reason,) = engine.rpc("coppice_prepare_kv_export")
        assert len(engine.ask(PROMPT, max_tokens=4)[0].token_ids) == 4
    assert isinstance(reason, str) and reason.startswith("UnsupportedCache: ")
