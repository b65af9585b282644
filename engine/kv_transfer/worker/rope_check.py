"""Rotary embedding of the served model, from its configuration, checked against vLLM's tables.

If the configuration and the table that vLLM computed differ, or layers have different embeddings,
keys cannot be shifted.
"""

from typing import Any, Final

import torch

from engine.kv_transfer.cache_spec import CacheLayout
from kernels.rope_shift import RotaryParams, UnsupportedRotary, parse_rotary

TOLERANCE: Final = 1e-2  # tables may be stored in bfloat16
SAMPLE_POSITIONS: Final = (0, 1, 2, 3, 5, 8, 13, 31)


def rotary_of_model(model: Any, config: Any, layout: CacheLayout) -> RotaryParams:
    """The model's rotary parameters. Raises UnsupportedRotary unless all layers share them."""
    embeddings = [_embedding_of(model, name) for name in layout.layers]
    if any(embedding is not embeddings[0] for embedding in embeddings):
        raise UnsupportedRotary("layers turn their keys differently")
    if getattr(config, "no_rope_layers", None):
        raise UnsupportedRotary("some layers do not turn their keys")
    rope = getattr(config, "rope_parameters", None)
    rotary = parse_rotary(rope or {}, layout.head_dim)
    _check(embeddings[0], rotary)
    return rotary


def _embedding_of(model: Any, layer: str) -> Any:
    """Rotary embedding of a cache layer's attention module, `model.layers.0.self_attn.attn`."""
    try:
        return model.get_submodule(layer.rpartition(".")[0]).rotary_emb
    except AttributeError as error:
        raise UnsupportedRotary(f"{layer} has no rotary embedding") from error


def _check(embedding: Any, rotary: RotaryParams) -> None:
    kind = type(embedding).__name__
    if not getattr(embedding, "is_neox_style", False):
        raise UnsupportedRotary(f"{kind} turns neighbouring channels")
    if embedding.rotary_dim != rotary.num_channels:
        raise UnsupportedRotary(f"{kind} turns {embedding.rotary_dim} channels")
    table = embedding.cos_sin_cache[list(SAMPLE_POSITIONS)].float().cpu()
    scale = float(table[0, : rotary.num_channels // 2].mean())  # YaRN's scale, kept in keys
    for place, row in zip(SAMPLE_POSITIONS, table, strict=True):
        expected = torch.cat(rotary.cos_sin(place)) * scale
        if not torch.allclose(row, expected, atol=TOLERANCE, rtol=0):
            raise UnsupportedRotary(f"{kind} turns by other angles than its configuration says")
