"""A tree as its caller gets it, once nothing grows any more."""

from collections import Counter
from collections.abc import Collection

from coppice.wire.rollouts import Outcome, SampleAnswer, SegmentFinish
from service.rollouts.group import Decode
from service.trees.tree import Row, Segment

WHOLE: Collection[SegmentFinish] = frozenset({"stop", "length", "budget"})
"""How a path ends by itself; a budget is a limit like any other."""


async def row_answer(index: int, row: Row, decode: Decode | None) -> SampleAnswer:
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
    whole: Collection[SegmentFinish],
    enough: int | None,
    stunted: bool,
    cancelled: bool,
) -> Outcome:
    """`whole`: the ends that leave nothing to be wished for. `stunted`: paths were kept from it."""
    finishes = Counter(leaf.finish for leaf in leaves)
    num_whole = sum(finishes[finish] for finish in whole)
    if enough is not None and num_whole >= enough:
        return "done"
    if num_whole and num_whole == len(leaves) and not stunted:
        return "done"
    if leaves and finishes["error"] == len(leaves):
        return "failed"
    return "cancelled" if cancelled else "partial"
