"""Worker side of the calls that prepare and flush exports."""

from typing import Any, TypedDict

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from engine.kv_transfer.cache_spec import UnsupportedCache
from engine.kv_transfer.connector import PromptKvConnector
from engine.kv_transfer.worker.rope_check import rotary_of_model
from kernels.rope_shift import UnsupportedRotary


class KvExportInfo(TypedDict):
    """Format of exported KV, over all ranks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    not_movable: str | None


def prepare(vllm_config: Any, model: Any) -> KvExportInfo:
    """Prepare exports and loads on this rank.

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
        not_movable = "the cache has layers of several kinds"
    attention_layers = vllm_config.compilation_config.static_forward_context
    connector.writer.prepare(attention_layers)
    connector.loader.prepare(attention_layers, rotary)
    return KvExportInfo(
        num_layers=len(layout.layers),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=str(layout.dtype).removeprefix("torch."),
        not_movable=not_movable,
    )


def flush() -> None:
    writer = _connector().writer
    if writer is not None:
        writer.flush()


def _connector() -> PromptKvConnector:
    if not has_kv_transfer_group():
        raise UnsupportedCache("no connector is configured")
    connector = get_kv_transfer_group()
    assert isinstance(connector, PromptKvConnector), "Coppice configures no other connector"
    return connector
