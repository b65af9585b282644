"""What captured graphs take, by a model of two parts.

All graphs of a plan are replayed one after the other on one stream, so they share one pool: it is
as large as what the largest of them keeps alive at a time, and since that one is captured first,
the others fit into it. Besides, every graph takes memory of the driver's for its kernels.

No GPU has been measured for this. Kernels a layer and bytes a kernel are chosen so that a model of
32 layers comes to 6 MiB a graph; `graphs.graph_bytes` puts a measured number in their place.
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
    """`token_bytes`: what a token keeps alive within a forward pass, on one rank."""

    graph_bytes: int
    token_bytes: int

    def pool_bytes(self, shapes: Collection[GraphShape]) -> int:
        return self.token_bytes * max((shape.tokens for shape in shapes), default=0)

    def total_bytes(self, shapes: Collection[GraphShape]) -> int:
        return self.pool_bytes(shapes) + self.graph_bytes * len(shapes)


def estimate_memory(
    directory: Path, *, ranks: int = 1, dtype: str = "auto", graph_bytes: int | None = None
) -> GraphMemory:
    """From the model's config.json, its layers split over `ranks`."""
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
    """The residual, a layer's input and the kept output, and the wider of its two halves."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention = (2 * heads + 2 * max(kv_heads, ranks)) * head  # queries, keys, values, output
    return int(3 * hidden + max(attention, 3 * _intermediate(config)) // ranks)


def _intermediate(config: dict[str, Any]) -> int:
    """Of all experts that a token goes to."""
    experts = config.get("num_experts_per_tok")
    if experts and "moe_intermediate_size" in config:
        return int(experts * config["moe_intermediate_size"])
    return int((experts or 1) * config.get("intermediate_size", 4 * config["hidden_size"]))
