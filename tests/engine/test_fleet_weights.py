"""Two real engines in one cluster sample from weights that the trainer sent to one as a delta."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from coppice import AsyncRollouts, WeightsConstraint
from engine.attention.settings import AttentionSettings
from engine.settings import EngineSettings
from engine.vllm_engine import VllmEngine
from service.cluster.in_memory_registry import InMemoryRegistry
from tests.cluster import fleet
from tests.engine.greedy import assert_greedy
from tests.engine.random_models import make_models, write_model
from tests.engine.seedling import MODEL as SEEDLING

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

PROMPT = [5, 7, 11, 13, 17, 19]
SECTIONS: dict[str, dict[str, Any]] = {
    "weights": {"peers": ("http://127.0.0.0/8:*",), "initial_version": "v7"},
    "cluster": {"heartbeat_seconds": 0.2, "expire_seconds": 30.0},
}


def engine(model: Path, cache: Path) -> VllmEngine:
    settings = EngineSettings(
        model=str(model),
        dtype="float32",
        max_context_tokens=128,
        max_sequences=4,
        cache_bytes=2**20,
        cpu_threads=1,
        cache_directory=cache,
    )
    return VllmEngine(settings, attention=AttentionSettings(shared_prefix="off"))


def stepped(tensors: dict[str, Any]) -> dict[str, Any]:
    """Weights after a training step: every value changes slightly."""
    draw = np.random.default_rng(9)
    return {
        name: values + draw.normal(scale=1e-3, size=values.shape).astype(values.dtype)
        for name, values in tensors.items()
    }


async def test_both_replicas_sample_from_weights_sent_to_one(tmp_path: Path) -> None:
    models = make_models(tmp_path / "models", tied=True)
    for file in SEEDLING.glob("tokenizer*"):
        shutil.copy(file, models["v7"])
    v8 = load_file(models["v8"] / "model.safetensors")
    v9 = stepped(v8)
    expected = write_model(tmp_path / "models" / "v9", v9, tied=True)
    oracle = AutoModelForCausalLM.from_pretrained(expected, dtype=torch.float32).eval()
    shared = InMemoryRegistry()
    engines = [engine(models["v7"], tmp_path) for _ in range(2)]
    async with fleet(tmp_path, engines, lambda: shared, **SECTIONS) as (one, two):
        async with AsyncRollouts(one.url, timeout=120) as first:
            for version, tensors in (("v8", v8), ("v9", v9)):
                published = await first.publish_weights(version, tensors, delta=True)
                assert published.pending_replicas == []
            (sent,) = [v for v in (await first.weights()).versions if v.version == "v9"]
            assert sent.base == "v8" and sent.received_bytes < sent.num_bytes
        for served in (one, two):
            async with AsyncRollouts(served.url, timeout=120) as rollouts:
                result = await rollouts.rollout(
                    [PROMPT],
                    temperature=0.0,
                    max_tokens=24,
                    ignore_eos=True,
                    weights=WeightsConstraint(exact_version="v9"),
                )
            (sample,) = result.groups[0].samples
            assert sample.token_versions() == ["v9"] * 24
            assert_greedy(oracle, PROMPT, sample.token_ids.tolist())
