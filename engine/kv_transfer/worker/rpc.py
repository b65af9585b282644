"""Worker methods, called by the service, that prepare and flush prompt KV exports.

The rotary embedding of the served model, from its configuration, is checked against vLLM's tables.
If they differ, or if layers have different embeddings, keys cannot be shifted.
"""

from pathlib import Path
from typing import Any, Final, TypedDict

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from engine.kv_transfer.cache_layout import CacheLayout, UnsupportedCache
from engine.kv_transfer.connector import PromptKvConnector
from kernels.rope_shift import RotaryParams, UnsupportedRotary, parse_rotary

TOLERANCE: Final = 1e-2  # tables may be stored in bfloat16
SAMPLE_POSITIONS: Final = (0, 1, 2, 3, 5, 8, 13, 31)


class KvExportInfo(TypedDict):
    """Format of exported prompt KV, which contains the heads of all ranks.

    `indirect_reason` is the reason why a GPU does not copy directly into shared memory,
    `gpu_memory` the rank's GpuMemory, and `gpu_failure` the reason why it could not be allocated.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    not_movable: str | None
    indirect_reason: str | None
    gpu_memory: dict[str, Any] | None
    gpu_failure: str | None


def prepare(
    vllm_config: Any, model: Any, *, gpu_bytes: int = 0, nixl: bool = False
) -> KvExportInfo:
    """Prepare exports and loads of prompt KV on this rank.

    Raises UnsupportedCache, or whatever prevents this rank from determining its cache's packing.
    """
    connector = _connector()
    if connector.layout is None:
        raise UnsupportedCache(str(connector.unsupported_reason))
    assert connector.writer is not None, "this is a worker"
    assert connector.loader is not None, "this is a worker"
    layout, rotary, not_movable = connector.layout, None, None
    try:
        rotary = rotary_of_model(model, vllm_config.model_config.hf_text_config, layout)
    except UnsupportedRotary as error:
        not_movable = str(error)
    if not connector.has_one_group:
        not_movable = "the model has several KV cache groups"
    attention_layers = vllm_config.compilation_config.static_forward_context
    connector.writer.prepare(attention_layers, gpu_bytes=gpu_bytes, nixl=nixl)
    connector.loader.prepare(attention_layers, rotary)
    gpu_arena = connector.writer.gpu_arena
    return KvExportInfo(
        num_layers=len(layout.layers),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=str(layout.dtype).removeprefix("torch."),
        not_movable=not_movable,
        indirect_reason=connector.writer.indirect_reason,
        gpu_memory=None if gpu_arena is None else gpu_arena.info().to_dict(),
        gpu_failure=connector.writer.gpu_arena_failure,
    )


def flush() -> None:
    writer = _connector().writer
    if writer is not None:
        writer.flush()


def release_pages(arena: Path, page_epoch: int) -> None:
    writer = _connector().writer
    if writer is not None:
        writer.release_pages(arena, page_epoch)


def _connector() -> PromptKvConnector:
    if not has_kv_transfer_group():
        raise UnsupportedCache("no connector is configured")
    group = get_kv_transfer_group()
    connectors = group.sub_connectors if isinstance(group, MultiConnector) else [group]
    ours = [connector for connector in connectors if isinstance(connector, PromptKvConnector)]
    if not ours:
        raise UnsupportedCache("no connector of prompt KV is configured")
    return ours[0]


def rotary_of_model(model: Any, config: Any, layout: CacheLayout) -> RotaryParams:
    """Rotary parameters of the model. Raises UnsupportedRotary unless all layers share them."""
    embeddings = [_embedding_of(model, name) for name in layout.layers]
    if any(embedding is not embeddings[0] for embedding in embeddings):
        raise UnsupportedRotary("layers have different rotary embeddings")
    if getattr(config, "no_rope_layers", None):
        raise UnsupportedRotary("some layers have no rotary embedding")
    rope = getattr(config, "rope_parameters", None)
    rotary = parse_rotary(rope or {}, layout.head_dim)
    _check(embeddings[0], rotary)
    return rotary


def _embedding_of(model: Any, layer: str) -> Any:
    """Rotary embedding of the layer of a KV cache, e.g. `model.layers.0.self_attn.attn`."""
    try:
        return model.get_submodule(layer.rpartition(".")[0]).rotary_emb
    except AttributeError as error:
        raise UnsupportedRotary(f"{layer} has no rotary embedding") from error


def _check(embedding: Any, rotary: RotaryParams) -> None:
    kind = type(embedding).__name__
    if not getattr(embedding, "is_neox_style", False):
        raise UnsupportedRotary(f"{kind} rotates adjacent channels")
    if embedding.rotary_dim != rotary.num_channels:
        raise UnsupportedRotary(f"{kind} rotates {embedding.rotary_dim} channels")
    table = embedding.cos_sin_cache[list(SAMPLE_POSITIONS)].float().cpu()
    scale = float(table[0, : rotary.num_channels // 2].mean())  # YaRN's scale, kept in keys
    for position, row in zip(SAMPLE_POSITIONS, table, strict=True):
        expected = torch.cat(rotary.cos_sin(position)) * scale
        if not torch.allclose(row, expected, atol=TOLERANCE, rtol=0):
            raise UnsupportedRotary(f"{kind} does not rotate by the configured angles")
