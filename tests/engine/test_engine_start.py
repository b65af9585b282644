"""Starts of the real engine that differ from the usual one, or fail."""

import json
import math
import shutil
from pathlib import Path

import pytest

from engine.errors import LoadFailed, StartFailed
from engine.types.samples import WEIGHTS
from engine.vllm_engine import VllmEngine
from tests.engine.default_engine.test_vllm_engine import prompt_of, run
from tests.engine.seedling import MODEL, settings

pytestmark = pytest.mark.engine


async def test_generation_config_is_ignored_except_for_stop_tokens(
    tmp_path: Path,
) -> None:
    """A temperature near zero in the model's config would make every sample the same."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    extra_end = 40
    defaults = {"temperature": 0.01, "top_k": 1, "max_new_tokens": 1, "do_sample": True}
    ends = {"eos_token_id": [json.loads((MODEL / "config.json").read_text())["eos_token_id"]]}
    ends["eos_token_id"].append(extra_end)
    (model / "generation_config.json").write_text(json.dumps(defaults | ends))
    engine = VllmEngine(settings(model))
    try:
        await engine.start("v0")
        assert extra_end in engine.info.eos_token_ids
        samples = await run(engine, prompt_of(4, first=5), n=16, temperature=2.0, max_tokens=40)
        assert len({tuple(sample.token_ids) for sample in samples}) > 8
        assert all(extra_end not in sample.token_ids[:-1] for sample in samples)
        assert all(math.isfinite(p) for sample in samples for p in sample.logprobs)
    finally:
        await engine.stop()


async def test_model_without_weights_files_is_served_with_random_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(StartFailed, match="has no"):
        await VllmEngine(settings(model)).start("v0")
    engine = VllmEngine(settings(model, load_format="dummy"))
    try:
        await engine.start("random")
        (sample,) = await run(engine, prompt_of(4, first=5), n=1, max_tokens=4)
        assert len(sample.token_ids) == 4
        features = {feature.name: feature for feature in engine.info.features}
        assert features["random_weights"].enabled
        await engine.pause("keep", recompute=True)
        with pytest.raises(LoadFailed, match="random weights"):
            await engine.sleep(2, frozenset((WEIGHTS,)))
    finally:
        await engine.stop()


async def test_settings_refused_by_vllm_are_reported_in_its_words_alone() -> None:
    engine = VllmEngine(settings(max_context_tokens=100_000))
    with pytest.raises(StartFailed, match="vLLM does not accept these settings: .*4096") as failed:
        await engine.start("v0")
    assert "\n" not in str(failed.value)
    assert engine.health().stage == "dead"
    await engine.stop()


@pytest.mark.parametrize(
    ("model", "revision", "said"),
    [
        ("/no/such/directory", None, "the model directory"),
        ("organization/model", None, "set engine.revision to a commit"),
    ],
)
async def test_missing_model_is_reported_in_one_sentence(
    model: str, revision: str | None, said: str
) -> None:
    engine = VllmEngine(settings(Path(model)).model_copy(update={"model": model}))
    with pytest.raises(StartFailed, match=said):
        await engine.start("v0")
    await engine.stop()
