"""Worker setup for prompt KV exports: layer formats, rotary embedding check, flush.

The rotary embedding of the served model, from its configuration, is checked against vLLM's tables.
If they differ, or if layers have different embeddings, keys cannot be shifted.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final, TypedDict

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.models.utils import extract_layer_index

from engine.kv_transfer.cache_layout import CacheLayout, UnsupportedCache
from engine.kv_transfer.connector import PromptKvConnector, connector_of
from engine.types.kv import LayerFormat
from kernels.rope_shift import RotaryParams, UnsupportedRotary, parse_rotary

logger = logging.getLogger(__name__)
TOLERANCE: Final = 1e-2  # tables may be stored in bfloat16
SAMPLE_POSITIONS: Final = (0, 1, 2, 3, 5, 8, 13, 31)


class KvExportInfo(TypedDict):
    """Format of exported prompt KV, which contains the heads of all ranks.

    `layers` are the fields of each LayerFormat. `indirect_reason` is the reason why a GPU does not
    copy directly into shared memory, `gpu_memory` the rank's GpuMemory, and `gpu_failure` the
    reason why it could not be allocated.
    """

    layers: list[dict[str, Any]]
    dtype: str
    not_movable: str | None
    indirect_reason: str | None
    gpu_memory: dict[str, Any] | None
    gpu_failure: str | None


def prepare(vllm_config: Any, model: Any, *, gpu_bytes: int = 0) -> KvExportInfo:
    """Prepare exports and loads of prompt KV on this rank.

    Raises UnsupportedCache, or whatever prevents this rank from determining its cache's packing.
    """
    connector = _connector()
    if not connector.layouts:
        raise UnsupportedCache(str(connector.unsupported_reason))
    assert connector.writer is not None, "this is a worker"
    layouts, writer = connector.layouts, connector.writer
    attention_layers = vllm_config.compilation_config.static_forward_context
    writer.prepare(attention_layers, gpu_bytes=gpu_bytes)
    return KvExportInfo(
        layers=[asdict(layer) for layer in layer_formats(layouts)],
        dtype=str(layouts[0].dtype).removeprefix("torch."),
        not_movable=_prepare_loads(connector, vllm_config, model),
        indirect_reason=writer.indirect_reason,
        gpu_memory=None if writer.gpu_arena is None else writer.gpu_arena.info().to_dict(),
        gpu_failure=writer.gpu_arena_failure,
    )


def _prepare_loads(connector: PromptKvConnector, vllm_config: Any, model: Any) -> str | None:
    """Prepare loads on this rank; returns the reason why spans cannot be loaded, if any."""
    assert connector.loader is not None, "this is a worker"
    if not connector.can_load:
        return "layers have sliding windows, or keys and values of different shapes"
    rotary, reason = None, None
    try:
        config = vllm_config.model_config.hf_text_config
        rotary = rotary_of_model(model, config, connector.layouts[0])
    except UnsupportedRotary as error:
        reason = str(error)
    try:
        connector.loader.prepare(vllm_config.compilation_config.static_forward_context, rotary)
    # The kernel's compiler and the driver may raise anything; exports do not need them.
    except Exception as error:
        logger.exception("prompt KV cannot be loaded on this rank")
        return f"the preparation of loads failed ({type(error).__name__})"
    return reason if connector.has_one_group else "the model has several KV cache groups"


def layer_formats(layouts: Sequence[CacheLayout]) -> list[LayerFormat]:
    """Formats of the model's layers, in layer order. Each layout is one region."""
    formats = {
        extract_layer_index(name): LayerFormat(
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            window=layout.window,
            block_size=1 if layout.window is None else layout.block_size,
            region=region,
        )
        for region, layout in enumerate(layouts)
        for name in layout.layers
    }
    return [formats[index] for index in sorted(formats)]


def flush() -> None:
    """Wait for all exports and loads."""
    connector = _connector()
    if connector.writer is not None:
        connector.writer.flush()
    if connector.loader is not None:
        connector.loader.flush()


def _connector() -> PromptKvConnector:
    if not has_kv_transfer_group():
        raise UnsupportedCache("no connector is configured")
    return connector_of(get_kv_transfer_group())


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
