"""Answer of a finished tree."""

from collections import Counter
from collections.abc import Collection

from coppice.wire.rollouts import Outcome, SampleAnswer, SegmentFinish
from service.rollouts.group import Decode
from service.trees.tree import LeafPath, Segment

COMPLETE_FINISHES: Collection[SegmentFinish] = frozenset({"stop", "length", "budget"})
"""Finish reasons of a path that ended by itself; the token budget is a limit like any other."""


async def row_answer(index: int, row: LeafPath, decode: Decode | None) -> SampleAnswer:
    """A leaf's path as the answer of a flat sample."""
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
    """Outcome of a tree.

    `complete_finishes` are the finish reasons of a complete leaf. `was_truncated`: the tree was
    ended before it was complete.
    """
    finishes = Counter(leaf.finish for leaf in leaves)
    num_complete = sum(finishes[finish] for finish in complete_finishes)
    if num_required is not None and num_complete >= num_required:
        return "done"
    if num_complete and num_complete == len(leaves) and not was_truncated:
        return "done"
    if leaves and finishes["error"] == len(leaves):
        return "failed"
    return "cancelled" if cancelled else "partial"
