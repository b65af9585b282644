"""Answer of a tree rollout: its outcome, its segments, and the samples that end at its leaves."""

from collections import Counter
from collections.abc import Collection, Sequence

from coppice.wire.columns.logprobs import PromptLogprobs
from coppice.wire.rollouts import GroupAnswer, Outcome, SampleAnswer, SegmentAnswer, SegmentFinish
from service.rollouts.group import OnPart
from service.rollouts.group_options import GroupOptions
from service.rollouts.sample_answer import answer_fields
from service.rollouts.sampling import parsed_message
from service.rollouts.trees.segment_tree import LeafPath, Segment, Tree


async def tree_answer(
    tree: Tree,
    options: GroupOptions,
    done: OnPart,
    *,
    flatten: bool,
    outcome: Outcome,
    num_cached_tokens: int,
    prompt_logprobs: PromptLogprobs | None,
) -> GroupAnswer:
    """Answer of a complete tree; `done` is called with each sample, if there are any."""
    rows = tree.rows() if flatten else []
    samples = [await row_answer(i, row, options) for i, row in enumerate(rows)]
    for sample in samples:
        done(sample)
    return GroupAnswer(
        id=options.id,
        index=options.index,
        outcome=outcome,
        num_prompt_tokens=len(options.prompt_token_ids),
        prompt_token_ids=options.prompt_token_ids if options.echo else None,
        num_cached_tokens=num_cached_tokens,
        samples=samples,
        segments=await tree.answers(),
        leaves=[leaf.id for leaf in tree.leaves()],
        num_dropped=tree.num_dropped,
        prompt_logprobs=prompt_logprobs,
    )


async def row_answer(index: int, row: LeafPath, options: GroupOptions) -> SampleAnswer:
    """Convert the path from the prompt to a leaf to the answer of a sample without a tree."""
    finish, stop_reason, decode = row.leaf.finish, row.leaf.stop_reason, options.decode
    tokens = row.tokens
    return SampleAnswer(
        **await answer_fields(tokens, SampleAnswer),
        index=index,
        text=await decode(tokens.token_ids, stop_reason, options.sampling) if decode else None,
        finish_reason="length" if finish == "cut" or finish == "budget" else finish,
        stop_reason=stop_reason,
        message=await parsed_message(options, tokens.token_ids, stop_reason),
    )


def outcome_of(
    leaves: Collection[Segment],
    *,
    complete_finishes: Collection[SegmentFinish],
    num_required: int | None,
    was_truncated: bool,
    cancelled: bool,
) -> Outcome:
    """Outcome of a tree rollout, from the finish reasons of its leaves.

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


def with_num_leaves(segments: Sequence[SegmentAnswer]) -> list[SegmentAnswer]:
    """Segments of a complete tree, parents first, with the numbers of leaves below them."""
    numbers = Counter[str | None]()
    for segment in reversed(segments):
        numbers[segment.id] = numbers[segment.id] or 1
        numbers[segment.parent] += numbers[segment.id]
    return [each.model_copy(update={"num_leaves": numbers[each.id]}) for each in segments]
