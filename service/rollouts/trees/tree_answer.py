"""Conversion of a rollout tree to the answer of its group: segments, samples and outcome."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from coppice.wire.columns.token_columns import TokenColumns
from coppice.wire.rollouts import GroupAnswer, Outcome, SampleAnswer, SegmentAnswer, SegmentFinish
from service.rollouts.groups import sample_answer
from service.rollouts.groups.options import GroupOptions
from service.rollouts.trees.segment import Segment, descendants

COMPLETE_FINISHES: Collection[SegmentFinish] = frozenset({"stop", "length", "budget"})
"""Finish reasons of a path that ended by itself; the token budget is a limit like any other."""


def segment_answer(
    segment: Segment, root: Segment | None = None, columns: dict[str, Any] | None = None
) -> SegmentAnswer:
    """Answer of a segment; those directly below `root` have no parent.

    `columns` are its fields with the columns of its tokens, if they are encoded already.
    """
    if columns is None:
        tokens = segment.sample or TokenColumns(
            token_ids=segment.token_ids.tolist(), logprobs=[], versions=()
        )
        columns = tokens.wire_fields(SegmentAnswer)
    return SegmentAnswer(
        **columns,
        id=segment.id,
        parent=None if segment.parent is root else segment.parent_id,
        depth=segment.depth,
        finish_reason=segment.finish,
        stop_reason=segment.stop_reason,
        sampled=segment.sample is not None,
    )


async def kept_answer(segment: Segment) -> SegmentAnswer:
    """Answer of a sampled segment, whose columns are encoded once."""
    if segment.answer is None:
        assert segment.sample is not None, "a rollout has no context below its prompt"
        columns = await sample_answer.answer_fields(segment.sample, SegmentAnswer)
        segment.answer = segment_answer(segment, columns=columns)
    return segment.answer


def with_samples(root: Segment) -> list[Segment]:
    """Segments below a root that are samples or have samples below them, parents first."""
    below, kept = list(descendants(root.children)), set[Segment]()
    for segment in reversed(below):
        if segment.sample is not None or not kept.isdisjoint(segment.children):
            kept.add(segment)
    return [segment for segment in below if segment in kept]


def root_answer(
    index: int, root: Segment, segments: Sequence[Segment], *, is_complete: bool
) -> GroupAnswer:
    """Answer of one tree of a session: the segments below a root, parents first."""
    answers = [segment_answer(each, root) for each in segments]
    leaves = leaves_of(answers)
    first = next(each for each in segments if each.sample is not None)
    return GroupAnswer(
        id=root.id,
        index=index,
        outcome=outcome_of(leaves),
        num_prompt_tokens=len(root.token_ids),
        prompt_token_ids=root.token_ids.tolist(),
        num_cached_tokens=min(first.num_cached_tokens, len(root.token_ids)),
        leaves=[leaf.id for leaf in leaves],
        samples=[],
        segments=with_num_leaves(answers) if is_complete else answers,
    )


async def row_answer(index: int, leaf: Segment, options: GroupOptions) -> SampleAnswer:
    """Answer of a sample without a tree, whose tokens are those from the prompt to a leaf."""
    finish = leaf.finish
    if finish == "cut" or finish == "budget":
        finish = "length"
    tokens = TokenColumns.joined(each.sample for each in leaf.path() if each.sample is not None)
    return await sample_answer.create(options, index, tokens, finish, leaf.stop_reason)


def leaves_of(segments: Sequence[SegmentAnswer]) -> list[SegmentAnswer]:
    parents = {segment.parent for segment in segments}
    return [segment for segment in segments if segment.id not in parents]


def outcome_of(
    leaves: Collection[SegmentAnswer],
    *,
    complete_finishes: Collection[SegmentFinish] = COMPLETE_FINISHES,
    num_required: int | None = None,
    was_truncated: bool = False,
    cancelled: bool = False,
) -> Outcome:
    """Outcome of a tree, from the finish reasons of its leaves.

    `complete_finishes` are the finish reasons of a complete leaf. `was_truncated`: the tree was
    ended before it was complete.
    """
    finishes = Counter(leaf.finish_reason for leaf in leaves)
    num_complete = sum(finishes[finish] for finish in complete_finishes)
    if num_required is not None and num_complete >= num_required:
        return "done"
    if num_complete and num_complete == len(leaves) and not was_truncated:
        return "done"
    if leaves and finishes["error"] == len(leaves):
        return "failed"
    return "cancelled" if cancelled else "partial"


def with_num_leaves(segments: Sequence[SegmentAnswer]) -> list[SegmentAnswer]:
    """Segments of a complete tree, parents first, with the numbers of leaves below them."""
    numbers = Counter[str | None]()
    for segment in reversed(segments):
        numbers[segment.id] = numbers[segment.id] or 1
        numbers[segment.parent] += numbers[segment.id]
    return [each.model_copy(update={"num_leaves": numbers[each.id]}) for each in segments]
