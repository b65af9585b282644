"""Validation of an adapter before it reaches the engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import CheckpointRefused
from engine.types.samples import AdapterInfo
from engine.weights.checkpoint import Checkpoint, read_base_checkpoint
from engine.weights.validation import check_adapter
from tests.adapters import MODULE, saved_adapter
from tests.engine.adapters.peft_adapters import saved
from tests.engine.seedling import MODEL

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def served(tmp_path: Path) -> Checkpoint:
    """A checkpoint in which only `up` (8 to 16 features) can have an adapter."""
    tensors = {
        f"{UP}.weight": (16, 8),
        "model.layers.0.mlp.experts.0.up_proj.weight": (16, 8),
        "model.embed_tokens.weight": (7, 8),
    }
    folder = tmp_path / "served"
    folder.mkdir()
    zeros = {name: np.zeros(shape, dtype=np.float32) for name, shape in tensors.items()}
    save_file(zeros, folder / "model.safetensors")
    return read_base_checkpoint(folder)


def refusal(served: Checkpoint, adapter: Path, **limits: Any) -> str:
    with pytest.raises(CheckpointRefused) as refused:
        check_adapter(served, adapter, max_rank=limits.pop("max_rank", 8), **limits)
    assert str(adapter) not in str(refused.value)
    return str(refused.value)


def changed(adapter: Path, tensors: dict[str, Any]) -> Path:
    file = adapter / "adapter_model.safetensors"
    held = {name: values for name, values in load_file(file).items() if name not in tensors}
    save_file(held | {name: v for name, v in tensors.items() if v is not None}, file)
    return adapter


def test_valid_adapter_reports_its_rank_and_size(served: Checkpoint, tmp_path: Path) -> None:
    form = check_adapter(served, saved_adapter(tmp_path / "a", rank=4), max_rank=8)
    assert form == AdapterInfo(rank=4, num_modules=1, num_bytes=4 * (4 * 8 + 16 * 4))


@pytest.mark.filterwarnings("ignore")
def test_adapter_of_every_projection_as_saved_by_peft_is_valid(tmp_path: Path) -> None:
    adapter = saved(tmp_path / "a", seed=1, rank=4, rank_pattern={"q_proj": 8})
    form = check_adapter(read_base_checkpoint(MODEL), adapter, max_rank=8)
    assert (form.rank, form.num_modules) == (8, 4 * 7)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"rank": 16}, "rank 16 exceeds 8"),
        ({"rank_pattern": {"up_proj": 32}}, "rank 32 exceeds 8"),
        ({"rank_pattern": {"up_proj": 0}}, "positive integers"),
        ({"r": [16]}, "positive integers"),
        ({"lora_alpha": float("inf")}, "must be numbers"),
        ({"lora_alpha": float("nan")}, "must be numbers"),
        ({"lora_alpha": 10**400}, "must be numbers"),
        ({"alpha_pattern": {"q_proj": 1e300}}, "must be numbers"),
        ({"alpha_pattern": {"q_proj": "8"}}, "must be numbers"),
        ({"rank_pattern": {f"up_proj_{n}": 4 for n in range(5000)}}, "more than 4096 keys"),
        ({"rank_pattern": {"([a-z.]+)+!": 8}}, "plain module names"),
        ({"peft_type": "VERA"}, "peft_type must be LORA"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ],
)
def test_adapter_config_must_be_supported(
    served: Checkpoint, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    assert said in refusal(served, saved_adapter(tmp_path / "a", **config))


@pytest.mark.parametrize("name", ["r", "lora_alpha", "target_modules"])
def test_field_that_vllm_requires_must_be_given(
    served: Checkpoint, tmp_path: Path, name: str
) -> None:
    adapter = saved_adapter(tmp_path / "a")
    config = json.loads((adapter / "adapter_config.json").read_text())
    del config[name]
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert refusal(served, adapter) == f"adapter_config.json has no {name}"


def test_directory_without_adapter_files_is_refused(served: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert "adapter_config.json is missing" in refusal(served, tmp_path / "a")
    adapter = saved_adapter(tmp_path / "b")
    (adapter / "adapter_config.json").write_text("[]")
    assert "not a JSON object" in refusal(served, adapter)
    adapter = saved_adapter(tmp_path / "c")
    (adapter / "adapter_model.safetensors").unlink()
    refusal(served, adapter)
    adapter = saved_adapter(tmp_path / "d")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"r": "4"}))
    assert "positive integers" in refusal(served, adapter)


def matrix(*shape: int) -> Any:
    return np.zeros(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({f"{MODULE}.lora_B.weight": matrix(16, 3)}, "over (16, 8) they must"),
        ({f"{MODULE}.lora_A.weight": matrix(4, 9)}, "over (16, 8) they must"),
        ({f"{MODULE}.lora_A.weight": matrix()}, "over (16, 8) they must"),
        ({f"{MODULE}.lora_A.weight": matrix(2, 8), f"{MODULE}.lora_B.weight": matrix(16, 2)}, "r"),
        ({f"{MODULE}.lora_B.weight": None}, "has only one"),
        ({f"{MODULE}.bias": matrix(16)}, "is not a LoRA matrix"),
        ({"base_model.model.model.norm.lora_A.weight": matrix(4, 8)}, "has no module model.norm"),
        (
            {"base_model.model.model.embed_tokens.lora_A.weight": matrix(4, 8)},
            "cannot have an adapter",
        ),
        (
            {"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight": matrix(4, 8)},
            "cannot have an adapter",
        ),
        ({f"{MODULE}.lora_A.weight": np.full((4, 8), np.nan, dtype=np.float32)}, "NaN"),
        ({f"{MODULE}.lora_A.weight": np.zeros((4, 8), dtype=np.int32)}, "I32"),
    ],
)
def test_every_matrix_must_match_its_module(
    served: Checkpoint, tmp_path: Path, tensors: dict[str, Any], said: str
) -> None:
    assert said in refusal(served, changed(saved_adapter(tmp_path / "a"), tensors))


def test_values_must_be_finite_in_the_served_dtype(served: Checkpoint, tmp_path: Path) -> None:
    adapter = saved_adapter(tmp_path / "a", scale=1e5)
    assert "overflow in float16" in refusal(served, adapter, dtype="float16")
    check_adapter(served, adapter, max_rank=8, dtype="bfloat16")
