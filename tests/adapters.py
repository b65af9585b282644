"""LoRA adapter directories as PEFT saves them. The fake engine reads only their rank."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

MODULE = "base_model.model.model.layers.0.mlp.up_proj"


def tensors_file(rank: int = 4, scale: float = 1.0, **metadata: str) -> bytes:
    sides = {
        f"{MODULE}.lora_A.weight": np.full((rank, 8), scale, dtype=np.float32),
        f"{MODULE}.lora_B.weight": np.full((16, rank), scale, dtype=np.float32),
    }
    data: bytes = save(sides, metadata=metadata or None)
    return data


def adapter_config(rank: int = 4, **more: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["up_proj"], **more}


def saved_adapter(folder: Path, rank: int = 4, scale: float = 1.0, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(rank, **config)))
    (folder / "adapter_model.safetensors").write_bytes(tensors_file(rank, scale))
    return folder
