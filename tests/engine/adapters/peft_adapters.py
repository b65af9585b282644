"""Adapters saved by PEFT over the shipped model, and PEFT's forward with them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.seedling import MODEL, reference


def saved(folder: Path, *, seed: int, rank: int = 8, **config: Any) -> Path:
    """Saves an adapter with two random matrices, as after long training."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    chosen = {"target_modules": "all-linear", "lora_alpha": 2 * rank, **config}
    settings = peft.LoraConfig(r=rank, init_lora_weights=False, **chosen)
    peft.get_peft_model(reference(), settings).save_pretrained(folder)
    return folder


def under(adapter: Path | None, model: Path = MODEL) -> Any:
    base = reference(model)
    if adapter is None:
        return base
    peft = pytest.importorskip("peft")
    return peft.PeftModel.from_pretrained(base, adapter).eval()
