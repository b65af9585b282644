"""Evaluation of a set of captured shapes on recorded steps, with a time model.

A decode step hits if a graph of its query length has room for it, and is padded to that graph. In
the time model, reading the weights costs as much as computing RIDGE_TOKENS tokens, at which an H100
turns from memory-bound to compute-bound (990 TFLOP/s in bfloat16 over 3.35 TB/s), and each padded
token costs one more.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.cudagraphs.graph_lookup import GraphLookup
from engine.cudagraphs.memory_model import GraphMemory
from engine.cudagraphs.shape import GraphShape

RIDGE_TOKENS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanScore:
    """Size and hit rate of a set of graphs.

    `padding` is the relative time added to the steps that hit, against a graph for each exact
    shape.
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
    return RIDGE_TOKENS + tokens
