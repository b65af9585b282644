"""Text report of a CUDA graph plan, beside the graphs that vLLM and the TLT system capture."""

from collections.abc import Iterable, Mapping, Sequence

from engine.cudagraphs.allowed_shapes import CaptureLimits, tlt_shapes, vllm_shapes
from engine.cudagraphs.plan_score import GraphMemory, PerLengthLookup, PlanScore, VllmLookup, score
from engine.cudagraphs.planner import Plan
from engine.cudagraphs.shapes import GraphShape

MIB = 2**20
NOTE = "Memory and padding are model estimates. The hit rate is that of decode steps."


def compare(
    plan: Plan, limits: CaptureLimits, memory: GraphMemory, requested: Mapping[GraphShape, float]
) -> dict[str, PlanScore]:
    """Memory, hit rate and padding of a CUDA graph plan and of its baselines, by name.

    The full product of sizes and lengths is scored with vLLM 0.32's lookup and with a lookup per
    length.
    """
    full, buckets = vllm_shapes(limits), tlt_shapes(limits)
    return {
        "vLLM 0.32: every size, every draft length": score(
            full, VllmLookup(full), requested, memory
        ),
        "the same graphs, lookup per length": score(full, PerLengthLookup(full), requested, memory),
        "TLT: draft lengths only where chosen": score(
            buckets, PerLengthLookup(buckets), requested, memory
        ),
        "this plan": score(plan.shapes, PerLengthLookup(plan.shapes), requested, memory),
    }


def render(plan: Plan, scores: Mapping[str, PlanScore]) -> str:
    baseline_bytes = next(iter(scores.values())).total_bytes
    comparison = [
        [
            name,
            str(s.num_graphs),
            f"{s.total_bytes / MIB:.0f}",
            f"{s.total_bytes / baseline_bytes:.2f}",
        ]
        + [f"{s.hit_rate:.4f}", f"{100 * s.padding:.2f} %"]
        for name, s in scores.items()
    ]
    heads = ["", "graphs", "MiB", "of vLLM's", "hit rate", "padding"]
    return "\n".join(
        [
            *_table(["drafts", "graphs", "captured numbers of samples"], _captured(plan)),
            "",
            *_table(heads, comparison),
            "",
            NOTE,
        ]
    )


def _captured(plan: Plan) -> Iterable[list[str]]:
    query_lens = sorted({shape.query_len for shape in plan.shapes if shape.query_len})
    for query_len in query_lens:
        samples = [str(s.samples) for s in plan.shapes if s.query_len == query_len]
        yield [str(query_len - 1), str(len(samples)), " ".join(samples)]
    if tokens := [str(s.tokens) for s in plan.shapes if s.query_len is None]:
        yield ["mixed", str(len(tokens)), f"{' '.join(tokens)} tokens"]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    every = [heads, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(heads))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    ]
