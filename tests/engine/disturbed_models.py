"""The bundled model, and versions of it that are disturbed more and more."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.vllm_engine import VllmEngine
from tests.engine.seedling import MODEL


def make_disturbed_models(folder: Path, num_versions: int = 3) -> dict[str, Path]:
    """Directories of the versions by name; `v0` is the bundled model."""
    made = {"v0": MODEL}
    for number in range(1, num_versions + 1):
        made[f"v{number}"] = version = folder / f"v{number}"
        version.mkdir()
        for file in MODEL.iterdir():
            if file.name != "model.safetensors":
                (version / file.name).symlink_to(file)
        draw = torch.Generator().manual_seed(7)
        weights = load_file(MODEL / "model.safetensors")
        disturbed = {
            name: (
                t.float() + 0.05 * number * t.float().std() * torch.randn(t.shape, generator=draw)
            )
            for name, t in weights.items()
        }
        kept = {name: t.to(weights[name].dtype) for name, t in disturbed.items()}
        save_file(kept, version / "model.safetensors", metadata={"format": "pt"})
    return made


async def update(
    engine: VllmEngine, models: dict[str, Path], version: str, *, keep_kv: bool = True
) -> None:
    await engine.pause("keep")
    await engine.update_weights(models[version], version, keep_kv=keep_kv)
    await engine.resume()
