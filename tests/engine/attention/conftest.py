"""A model with unambiguous greedy choices, and Hugging Face's implementation of it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.random_models import random_tensors, write_model


@pytest.fixture(scope="module")
def sharp_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = random_tensors(7, tied=False, sharpness=4.0)
    return write_model(tmp_path_factory.mktemp("models") / "sharp", tensors, tied=False)


@pytest.fixture(scope="module")
def reference(sharp_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(sharp_model, dtype=torch.float32).eval()
