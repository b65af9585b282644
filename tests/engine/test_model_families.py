"""Model families on the real engine: exact logprobs, weights updates, and what each supports.

docs/reference/model-features.md is the table of these results.
"""

import asyncio
from pathlib import Path

import pytest

from engine.settings import AttentionSettings
from engine.types import SampleRequest, Sampling
from engine.vllm_engine import VllmEngine
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import COMMITTED, EXPORTING, exported, reference_kv
from tests.engine.kv_transfer.export_models import kv_format as export_format
from tests.engine.model_families import COMMON, save_family
from tests.engine.seedling import reference, settings, teacher_forced
from tests.engine.stepped_engine import LiveEngine, live_engine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
PROMPT = [5 + i * 7 % 200 for i in range(100)]  # longer than the sliding windows
TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.1
QUANTIZED_TOLERANCE = 0.4  # logprobs differ by about 3 between the two sets of weights
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


def test_weights_update_that_vllm_cannot_load_is_refused_and_undone(tmp_path: Path) -> None:
    """vLLM's loader of gpt-oss bypasses the weight loaders of its experts."""
    first = save_family(tmp_path / "v1", "attention_sinks")
    second = save_family(tmp_path / "v2", "attention_sinks", seed=6)
    with live_engine(first, dtype="bfloat16") as engine:
        before = largest_error(engine, first)
        with engine.paused():
            (answer,) = engine.load(second)
        after = largest_error(engine, first)
    assert (answer["ok"], answer["restored"]) == (False, True)
    assert "vLLM cannot load new weights into model.layers.0" in answer["error"]
    assert max(before, after) < BFLOAT16_TOLERANCE


@pytest.mark.parametrize(
    "setting", [{"kv_cache_dtype": "fp8"}, {"quantization": "int8_per_channel_weight_only"}]
)
def test_quantized_model_is_served_and_updated(setting: dict[str, str], tmp_path: Path) -> None:
    first = save_family(tmp_path / "v1", "dense")
    second = save_family(tmp_path / "v2", "dense", seed=6)
    with live_engine(first, dtype="bfloat16", **setting) as engine:
        assert largest_error(engine, first) < QUANTIZED_TOLERANCE
        engine.swap(second)
        assert largest_error(engine, second) < QUANTIZED_TOLERANCE


def test_gated_delta_net_is_served_and_updated_without_prompt_kv(tmp_path: Path) -> None:
    """vLLM's CPU kernels of the family need bfloat16."""
    first = save_family(tmp_path / "v1", "gated_delta_net")
    second = save_family(tmp_path / "v2", "gated_delta_net", seed=6)
    with live_engine(first, dtype="bfloat16", **EXPORTING) as engine:
        (reason,) = engine.rpc("coppice_prepare_kv_export")
        assert reason == "UnsupportedCache: layers in several KV cache groups"
        assert largest_error(engine, first) < BFLOAT16_TOLERANCE
        engine.swap(second)
        assert largest_error(engine, second) < BFLOAT16_TOLERANCE


@pytest.mark.parametrize(
    ("family", "enabled", "reason"),
    [
        ("mixture_of_experts", True, "used in every step with a shared prefix"),
        ("sliding_window", False, "all layers have sliding windows"),
    ],
)
async def test_shared_prefix_attention_is_used_or_says_why_not(
    family: str, enabled: bool, reason: str, tmp_path: Path
) -> None:
    model = save_family(tmp_path / "model", family)
    engine = VllmEngine(
        settings(model, max_context_tokens=256, prompt_kv=False),
        attention=AttentionSettings(shared_prefix="always"),
    )
    try:
        await engine.start("v0")
        features = {feature.name: feature for feature in engine.info.features}
        sampling = Sampling(max_tokens=8, ignore_eos=True)
        submitted = await engine.submit(
            [SampleRequest(id=f"{i}", prompt_token_ids=PROMPT, sampling=sampling) for i in range(4)]
        )
        completions = await asyncio.gather(*submitted)
        await asyncio.sleep(1.5)  # counters are read once per second
        steps = engine.shared_prefix().steps_grouped
    finally:
        await engine.stop()
    found = features["shared_prefix_attention"]
    assert (found.enabled, found.reason, steps > 0) == (enabled, reason, enabled)
    for done in completions:
        expected = teacher_forced(reference(model), PROMPT, list(done.token_ids))
        assert done.logprobs == pytest.approx(expected, abs=TOLERANCE)
