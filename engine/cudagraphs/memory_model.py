"""Memory model of captured CUDA graphs: a shared pool plus a fixed size per graph.

All graphs of a plan are replayed one after another on one stream, so they share one pool. Its size
is the peak live memory of the largest graph; since that is captured first, the others fit into it.
In addition, the driver uses memory for the kernels of each graph.

This has not been measured on a GPU. Kernels per layer and bytes per kernel are chosen so that a
model of 32 layers takes 6 MiB per graph; `graphs.graph_bytes` overrides the estimate with a
measured value.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.cudagraphs.shape import GraphShape

KERNELS_PER_LAYER, BYTES_PER_KERNEL = 12, 2**14
MIN_GRAPH_BYTES = 2**20  # as vLLM's own profiler assumes
_ITEM_BYTES = {"float32": 4, "float": 4, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """Model parameters; `token_bytes` is the live memory per token of a forward pass, per rank."""

    graph_bytes: int
    token_bytes: int

    def pool_bytes(self, shapes: Collection[GraphShape]) -> int:
        return self.token_bytes * max((shape.tokens for shape in shapes), default=0)

    def total_bytes(self, shapes: Collection[GraphShape]) -> int:
        return self.pool_bytes(shapes) + self.graph_bytes * len(shapes)


def estimate_memory(
    directory: Path, *, ranks: int = 1, dtype: str = "auto", graph_bytes: int | None = None
) -> GraphMemory:
    """Estimate from the model's config.json, with layers sharded over `ranks`."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    stored = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    item = _ITEM_BYTES.get(stored if dtype == "auto" else dtype, 2)
    layers = config["num_hidden_layers"]
    return GraphMemory(
        graph_bytes=graph_bytes
        or max(MIN_GRAPH_BYTES, layers * KERNELS_PER_LAYER * BYTES_PER_KERNEL),
        token_bytes=item * _live_elements(config, ranks),
    )


def _live_elements(config: dict[str, Any], ranks: int) -> int:
    """Live elements per token: residual, layer input, kept output, wider half of a layer."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = (2 * heads + 2 * max(kv_heads, ranks)) * head  # queries, keys, values, output
    return int(3 * hidden + max(attention, 3 * _intermediate(config)) // ranks)


def _intermediate(config: dict[str, Any]) -> int:
    """Total MLP width of all experts that a token is routed to."""
    experts = config.get("num_experts_per_tok")
    if experts and "moe_intermediate_size" in config:
        return int(experts * config["moe_intermediate_size"])
    return int((experts or 1) * config.get("intermediate_size", 4 * config["hidden_size"]))
