"""A tree as its caller gets it, once nothing grows any more."""

from collections import Counter
from collections.abc import Collection

from coppice.wire.rollouts import Outcome, SampleAnswer, SegmentFinish
from service.rollouts.group import Decode
from service.trees.tree import LeafPath, Segment

COMPLETE_FINISHES: Collection[SegmentFinish] = frozenset({"stop", "length", "budget"})
"""How a path ends by itself; a budget is a limit like any other."""


async def row_answer(index: int, row: LeafPath, decode: Decode | None) -> SampleAnswer:
    """What a flat sample would have been."""
    finish = row.leaf.finish
    return SampleAnswer(
        index=index,
        token_ids=row.token_ids,
        logprobs=row.logprobs,
        text=await decode(row.token_ids) if decode else None,
        finish_reason="length" if finish == "cut" or finish == "budget" else finish,
        versions=row.versions,
    )


def outcome_of(
    leaves: Collection[Segment],
    *,
    complete_finishes: Collection[SegmentFinish],
    num_required: int | None,
    was_truncated: bool,
    cancelled: bool,
) -> Outcome:
    """`complete_finishes`: the ends that leave nothing to be wished for. `was_truncated`: paths
    were kept from it."""
    finishes = Counter(leaf.finish for leaf in leaves)
    num_complete = sum(finishes[finish] for finish in complete_finishes)
    if num_required is not None and num_complete >= num_required:
        return "done"
    if num_complete and num_complete == len(leaves) and not was_truncated:
        return "done"
    if leaves and finishes["error"] == len(leaves):
        return "failed"
    return "cancelled" if cancelled else "partial"
