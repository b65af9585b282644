"""Evaluation of a set of captured CUDA graphs: memory, hit rate and padding."""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.cudagraphs.shapes import GraphShape, mixed


class GraphLookup(Protocol):
    """Finds the captured graph shape to which a step is padded; None if no shape fits."""

    def find(self, requested: GraphShape) -> GraphShape | None: ...


class PerLengthLookup:
    """Finds the smallest captured graph of a step's query length that fits, as a plan assumes."""

    def __init__(self, shapes: Iterable[GraphShape]) -> None:
        self._sizes_by_query: dict[int | None, list[int]] = defaultdict(list)
        for shape in sorted(shapes, key=lambda shape: shape.tokens):
            self._sizes_by_query[shape.query_len].append(shape.tokens)

    def find(self, requested: GraphShape) -> GraphShape | None:
        return _next(self._sizes_by_query.get(requested.query_len, []), requested)


class VllmLookup:
    """Finds the captured graph shape for a step in the way of vLLM 0.32.

    It considers only shapes of the next captured number of tokens. If these have another query
    length it falls back to a mixed graph, even if the next larger size has the right length
    (https://github.com/vllm-project/vllm/pull/56136).
    """

    def __init__(self, shapes: Collection[GraphShape]) -> None:
        self._decode = {shape for shape in shapes if shape.query_len is not None}
        self._levels = sorted({shape.tokens for shape in self._decode})
        self._mixed = PerLengthLookup(shape for shape in shapes if shape.query_len is None)

    def find(self, requested: GraphShape) -> GraphShape | None:
        if requested.query_len is None:
            return self._mixed.find(mixed(requested.tokens))
        found = _next(self._levels, requested)
        return found if found in self._decode else None


def _next(levels: list[int], requested: GraphShape) -> GraphShape | None:
    index = bisect_left(levels, requested.tokens)
    return GraphShape(levels[index], requested.query_len) if index < len(levels) else None


KERNELS_PER_LAYER, BYTES_PER_KERNEL = 12, 2**14
MIN_GRAPH_BYTES = 2**20  # as vLLM's own profiler assumes
_ITEM_BYTES = {"float32": 4, "float": 4, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMemory:
    """Memory model of captured CUDA graphs: a shared pool plus a fixed size per graph.

    All graphs of a plan are replayed one after another on one stream, so they share one pool. Its
    size is the peak live memory of the largest graph; since that is captured first, the others fit
    into it. In addition, the driver uses memory for the kernels of each graph: `graph_bytes` per
    shape. `token_bytes` is the live memory per token of a forward pass, per rank.
    """

    graph_bytes: int
    token_bytes: int

    def pool_bytes(self, shapes: Collection[GraphShape]) -> int:
        return self.token_bytes * max((shape.tokens for shape in shapes), default=0)

    def total_bytes(self, shapes: Collection[GraphShape]) -> int:
        return self.pool_bytes(shapes) + self.graph_bytes * len(shapes)


def estimate_memory(
    directory: Path,
    *,
    ranks: int = 1,
    dtype: str = "auto",
    with_adapters: bool = False,
) -> GraphMemory:
    """Estimate CUDA graph memory from a model's config.json, with layers sharded over `ranks`.

    Kernels per layer and bytes per kernel are assumed, so that a model of 32 layers takes 6 MiB per
    graph. With adapters, vLLM captures each shape twice, without and with the kernels of LoRA.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    stored = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    item = _ITEM_BYTES.get(stored if dtype == "auto" else dtype, 2)
    layers = config["num_hidden_layers"]
    estimate = max(MIN_GRAPH_BYTES, layers * KERNELS_PER_LAYER * BYTES_PER_KERNEL)
    return GraphMemory(
        graph_bytes=estimate * (2 if with_adapters else 1),
        token_bytes=item * _live_elements(config, ranks),
    )


def _live_elements(config: dict[str, Any], ranks: int) -> int:
    """Activation elements per token that are live at the peak of a forward pass.

    They are the residual, a layer's input, the retained output, and the wider of attention and MLP.
    """
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


RIDGE_TOKENS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanScore:
    """Memory, hit rate and padding of a set of captured CUDA graphs.

    `padding` is the relative time that the steps with a hit take longer than with a graph of
    exactly their shape.
    """

    num_graphs: int
    total_bytes: int
    hit_rate: float
    padding: float


def score(
    shapes: Collection[GraphShape],
    lookup: GraphLookup,
    requested: Mapping[GraphShape, float],
    memory: GraphMemory,
) -> PlanScore:
    """Evaluate a set of CUDA graph shapes on weighted step shapes: memory, hit rate, padding.

    A decode step hits if a graph of its query length has room for it, and is padded to that graph.
    """
    steps = hits = exact = padded = 0.0
    for shape, weight in requested.items():
        if shape.query_len is None:
            continue
        steps += weight
        if found := lookup.find(shape):
            hits += weight
            exact += weight * step_cost(shape.tokens)
            padded += weight * step_cost(found.tokens)
    return PlanScore(
        num_graphs=len(shapes),
        total_bytes=memory.total_bytes(shapes),
        hit_rate=hits / steps if steps else 1.0,
        padding=padded / exact - 1 if exact else 0.0,
    )


def step_cost(tokens: int) -> float:
    """Modeled time of an engine step, in units of the time to compute one token.

    Reading the weights costs as much as computing RIDGE_TOKENS tokens, at which an H100 turns from
    memory-bound to compute-bound (990 TFLOP/s in bfloat16 over 3.35 TB/s), and each token costs one
    more.
    """
    return RIDGE_TOKENS + tokens
