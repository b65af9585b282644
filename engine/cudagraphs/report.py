"""A plan as tables to read: what is captured, and how that compares."""

from collections.abc import Iterable, Mapping, Sequence

from engine.cudagraphs.baselines import Limits, bucketed, product
from engine.cudagraphs.dispatch import Ladder, NextTokens
from engine.cudagraphs.evaluate import Score, score
from engine.cudagraphs.memory_model import GraphMemory
from engine.cudagraphs.planner import Plan
from engine.cudagraphs.shape import Shape

MIB = 2**20
NOTE = "Bytes and padding are a model's; hits are those of the decode steps."


def compared(
    plan: Plan, limits: Limits, memory: GraphMemory, asked: Mapping[Shape, float]
) -> dict[str, Score]:
    """The product both as vLLM 0.32 finds its graphs, and as a ladder would."""
    full, buckets = product(limits), bucketed(limits)
    return {
        "every size with every length, as vLLM 0.32": score(full, NextTokens(full), asked, memory),
        "the same, found by length": score(full, Ladder(full), asked, memory),
        "a length only where it is chosen, as TLT": score(buckets, Ladder(buckets), asked, memory),
        "this plan": score(plan.shapes, Ladder(plan.shapes), asked, memory),
    }


def rendered(plan: Plan, scores: Mapping[str, Score]) -> str:
    whole = next(iter(scores.values())).total_bytes
    comparison = [
        [name, str(s.num_graphs), f"{s.total_bytes / MIB:.0f}", f"{s.total_bytes / whole:.2f}"]
        + [f"{s.hit_rate:.4f}", f"{100 * s.padding:.2f} %"]
        for name, s in scores.items()
    ]
    heads = ["", "graphs", "MiB", "of the product", "hit rate", "padding"]
    return "\n".join(
        [
            *_table(["drafts", "graphs", "captured for so many samples"], _captured(plan)),
            "",
            *_table(heads, comparison),
            "",
            NOTE,
        ]
    )


def _captured(plan: Plan) -> Iterable[list[str]]:
    queries = sorted({shape.query for shape in plan.shapes if shape.query})
    for query in queries:
        samples = [str(s.samples) for s in plan.shapes if s.query == query]
        yield [str(query - 1), str(len(samples)), " ".join(samples)]
    if tokens := [str(s.tokens) for s in plan.shapes if s.query is None]:
        yield ["mixed", str(len(tokens)), f"{' '.join(tokens)} tokens"]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    every = [heads, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(heads))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    ]
