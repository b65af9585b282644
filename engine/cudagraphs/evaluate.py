"""How well a set of captured shapes serves recorded steps, by a model of time.

A decode step hits if a graph of its length has room for it. It is padded to that graph: reading the
weights costs as much as RIDGE_TOKENS tokens compute, which is where an H100 turns from waiting for
memory to computing (990 TFLOP/s in bfloat16 over 3.35 TB/s), and each padded token one more.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.cudagraphs.dispatch import GraphLookup
from engine.cudagraphs.memory_model import GraphMemory
from engine.cudagraphs.shape import GraphShape

RIDGE_TOKENS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanScore:
    """`padding`: by how much longer the steps that hit take than with a graph for each shape."""

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
