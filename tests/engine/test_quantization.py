"""Quantized engines: weights in bfloat16 that are quantized on loading, and quantized checkpoints.

A weights version gives exactly the samples of an engine that started from it, because each layer is
quantized again from the same values.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.errors import CheckpointRefused
from engine.patches.cpu_int8_kernel import VNNI
from engine.weights.checkpoint import read_base_checkpoint
from engine.weights.validation import check_checkpoint
from tests.engine.model_families import save_family
from tests.engine.random_models import in_bfloat16, make_models
from tests.engine.stepped_engine import Answer, LiveEngine, live_engine

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

PROMPTS = ([5, 6, 7], [5 + i * 7 % 200 for i in range(100)])
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
needs_float16 = pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_fp16", True),
    reason="without AVX512_FP16, this method is refused (test_cpu_dtype.py)",
)
needs_vnni = pytest.mark.skipif(
    not any(torch.cpu.get_capabilities().get(name, True) for name in VNNI),
    reason="without VNNI, a start is refused (test_int8_is_refused_where_it_would_saturate)",
)
needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's kernel of this method needs AMX"
)


def models_of(folder: Path, family: str) -> dict[str, Path]:
    if family == "dense":
        made = make_models(folder / "float32", tied=True)
    else:
        made = {
            f"v{seed}": save_family(folder / "float32" / f"v{seed}", family, seed=seed)
            for seed in (7, 8)
        }
    return {name: in_bfloat16(path, folder / name) for name, path in made.items()}


def answers(engine: LiveEngine) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs, without prefixes of an earlier call."""
    found: list[Answer] = []
    with engine.paused(recompute=True):
        pass
    for prompt in PROMPTS:
        found += engine.ask(prompt, max_tokens=24)
    return [(answer.token_ids, answer.logprobs) for answer in found]


def dtypes(engine: LiveEngine) -> set[torch.dtype]:
    runner = engine.core.model_executor.driver_worker.worker.model_runner
    return {parameter.dtype for parameter in runner.get_model().parameters()}


def fall_asleep_and_wake(engine: LiveEngine) -> None:
    """Sleep at level 2; the weights are loaded again."""
    tags = ["kv_cache", "weights"]
    with engine.paused(recompute=True):
        assert engine.rpc("coppice_sleep", 2, tags) == [None]
        assert engine.rpc("coppice_wake", tags) == [None]
        (loaded,) = engine.load(engine.serving)
        assert loaded["ok"], loaded


@pytest.mark.parametrize(
    ("family", "method", "dtype"),
    [
        pytest.param("dense", "fp8_per_channel", torch.float8_e4m3fn, marks=needs_float16),
        pytest.param("dense", "fp8_per_block", torch.float8_e4m3fn, marks=needs_amx),
        pytest.param(
            "mixture_of_experts", "int8_per_channel_weight_only", torch.int8, marks=needs_amx
        ),
    ],
)
@pytest.mark.exhaustive
def test_versions_are_quantized_as_by_an_engine_that_starts_from_them(
    family: str, method: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    models = models_of(tmp_path, family)
    settings: dict[str, Any] = {"dtype": "bfloat16", "quantization": method}
    with live_engine(models["v8"], **settings) as engine:
        expected = answers(engine)
    with live_engine(models["v7"], **settings) as engine:
        first = answers(engine)
        for name in ("v8", "v7"):
            check_checkpoint(read_base_checkpoint(models["v7"]), models[name], dtype="bfloat16")
        engine.swap(models["v8"])
        assert dtype in dtypes(engine)
        assert answers(engine) == expected != first
        fall_asleep_and_wake(engine)
        assert answers(engine) == expected
        engine.swap(models["v7"])
        assert answers(engine) == first


@needs_float16
@pytest.mark.exhaustive
def test_ranks_quantize_a_version_as_an_engine_that_starts_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cpus[0]}|{cpus[-1]}")
    models = models_of(tmp_path, "dense")
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "quantization": "fp8_per_channel",
        "tensor_parallel_size": 2,
    }
    with live_engine(models["v8"], **settings) as engine:
        expected = answers(engine)
    with live_engine(models["v7"], **settings) as engine:
        first = answers(engine)
        engine.swap(models["v8"])
        assert answers(engine) == expected != first
        engine.swap(models["v7"])
        assert answers(engine) == first


@needs_float16
@pytest.mark.exhaustive
def test_quantized_samples_differ_from_those_of_bfloat16(tmp_path: Path) -> None:
    """The other test checks only dtypes, and would pass if the quantized values were not used."""
    model = models_of(tmp_path, "dense")["v7"]
    found = []
    for method in (None, "fp8_per_channel"):
        with live_engine(model, dtype="bfloat16", quantization=method) as engine:
            found.append(answers(engine))
    assert found[0] != found[1]


def quantized_checkpoint(model: Path, directory: Path) -> Path:
    """A checkpoint in the format compressed-tensors: int8 weights with a scale per channel."""
    in_bfloat16(model, directory)
    tensors = dict(_quantized(load_file(directory / "model.safetensors")))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**common, "strategy": "channel", "dynamic": False},
                "input_activations": {**common, "strategy": "token", "dynamic": True},
            }
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _quantized(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, values in tensors.items():
        if name.split(".")[-2] in PROJECTIONS:
            scale = values.float().abs().amax(dim=1, keepdim=True) / 127
            yield name, (values.float() / scale).round().to(torch.int8)
            yield f"{name}_scale", scale.bfloat16()
        else:
            yield name, values


def reference_logprobs(served: Path, directory: Path, answer: Answer) -> list[float]:
    """Logprobs of a greedy answer to the first prompt, by transformers with dequantized weights."""
    stored = load_file(served / "model.safetensors")
    values = {
        name: tensor.float() * stored.get(f"{name}_scale", torch.ones(1))
        for name, tensor in stored.items()
        if not name.endswith("_scale")
    }
    shutil.copytree(served, directory)
    save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokens = torch.tensor([PROMPTS[0] + answer.token_ids])
        logprobs = model(tokens).logits[0].log_softmax(-1)
    places = range(len(PROMPTS[0]) - 1, len(tokens[0]) - 1)
    return [float(logprobs[place, tokens[0, place + 1]]) for place in places]


def test_int8_is_refused_where_it_would_saturate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = quantized_checkpoint(make_models(tmp_path, tied=True)["v7"], tmp_path / "int8")
    reported = torch.cpu.get_capabilities()
    older = {name: "vnni" not in name and value for name, value in reported.items()}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: older)
    with pytest.raises(ValueError, match="without VNNI instructions, int8 products saturate"):
        LiveEngine(served, dtype="bfloat16")


@needs_vnni
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantized_checkpoint_is_served_and_cannot_be_updated(dtype: str, tmp_path: Path) -> None:
    models = make_models(tmp_path, tied=True)
    served = quantized_checkpoint(models["v7"], tmp_path / "int8")
    candidates = in_bfloat16(models["v8"], tmp_path / "v8-bf16"), served
    for candidate in candidates:
        with pytest.raises(CheckpointRefused, match="the served checkpoint is quantized"):
            check_checkpoint(read_base_checkpoint(served), candidate, dtype=dtype)
    with live_engine(served, dtype=dtype) as engine:
        (answer,) = engine.ask(PROMPTS[0], max_tokens=24)
        expected = reference_logprobs(served, tmp_path / "dequantized", answer)
        assert answer.logprobs == pytest.approx(expected, abs=0.1)
        before = answers(engine)
        with engine.paused():
            for candidate in candidates:
                (loaded,) = engine.load(candidate)
                assert (loaded["ok"], loaded["restored"]) == (False, True)
                assert "is quantized (model.layers.0" in loaded["error"]
        assert answers(engine) == before
