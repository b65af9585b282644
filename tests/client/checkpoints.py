"""Checkpoints on disk, as trainers write them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"


def single(path: Path) -> Path:
    save_file({"w": np.ones(4, dtype=np.float32)}, path)
    return path


def sharded(folder: Path, num_shards: int = 3) -> list[Path]:
    """The files to upload, the index first. The folder also has files that must not be sent."""
    shards = [
        folder / f"model-{number:05}-of-{num_shards:05}.safetensors"
        for number in range(1, num_shards + 1)
    ]
    for number, shard in enumerate(shards):
        save_file({f"w{number}": np.full(2, number, dtype=np.float32)}, shard)
    weight_map = {f"w{number}": shard.name for number, shard in enumerate(shards)}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"x")
    single(folder / "consolidated.safetensors")
    return [folder / INDEX, *shards]
