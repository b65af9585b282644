"""Attachment of prompts to a session's tree: extension, branches, roots, splits and answers."""

from collections.abc import Sequence

from coppice.wire.columns.support import Support
from coppice.wire.columns.token_columns import TokenColumns, TokenLists
from coppice.wire.columns.weights_version_spans import VersionSpan
from coppice.wire.rollouts import GroupAnswer, SegmentFinish
from service.rollouts.trees.segment import Segment
from service.rollouts.trees.token_tree import TokenTree

PROMPT = list(range(100, 110))


def make_tree() -> TokenTree:
    return TokenTree("s", min_shared_tokens=4)


def sampled(token_ids: list[int]) -> TokenLists:
    return TokenColumns(token_ids=token_ids, logprobs=[-0.5] * len(token_ids), versions=())


def call(
    tree: TokenTree,
    prompt: Sequence[int],
    sample: Sequence[int],
    preferred: Segment | None = None,
    finish: SegmentFinish = "stop",
) -> Segment:
    """One call: the prompt is attached, and the sample added."""
    segment = tree.add_sample(
        tree.attach(prompt, preferred),
        TokenColumns(
            token_ids=list(sample),
            logprobs=[-float(token) for token in sample],
            versions=(VersionSpan(version="1", start=0, end=len(sample)),),
            support=Support(tuple(bytes([token]) for token in sample), 256),
        ),
        finish=finish,
    )
    assert segment is not None
    assert tree.token_ids(segment) == [*prompt, *sample]
    return segment


def kinds(group: GroupAnswer) -> list[tuple[bool, list[int]]]:
    return [(segment.sampled, segment.token_ids) for segment in group.segments or ()]


def test_first_prompt_is_a_root() -> None:
    tree = make_tree()
    attachment = tree.attach(PROMPT)
    assert (attachment.attached, attachment.is_repeated) == ("root", False)
    assert (attachment.parent.end, attachment.num_new_context_tokens) == (10, 10)


def test_next_prompt_extends_the_sample_by_context() -> None:
    tree = make_tree()
    call(tree, PROMPT, [1, 2])
    attachment = tree.attach([*PROMPT, 1, 2, 50, 51])
    assert (attachment.attached, attachment.num_new_context_tokens) == ("extended", 2)
    tree.add_sample(attachment, sampled([3]))
    (group,) = tree.answer()
    assert group.prompt_token_ids == PROMPT
    assert kinds(group) == [(True, [1, 2]), (False, [50, 51]), (True, [3])]
    assert [segment.num_leaves for segment in group.segments or ()] == [1, 1, 1]
    assert [segment.depth for segment in group.segments or ()] == [0, 1, 2]
    assert group.num_generated_tokens == 3


def test_other_context_after_a_sample_is_a_branch_that_shares_its_beginning() -> None:
    tree = make_tree()
    call(tree, PROMPT, [1, 2])
    call(tree, [*PROMPT, 1, 2, 50, 51], [3])
    attachment = tree.attach([*PROMPT, 1, 2, 50, 52])
    assert (attachment.attached, attachment.num_new_context_tokens) == ("branched", 1)
    tree.add_sample(attachment, sampled([4]))
    (group,) = tree.answer()
    assert kinds(group) == [
        (True, [1, 2]),
        (False, [50]),
        (False, [51]),
        (True, [3]),
        (False, [52]),
        (True, [4]),
    ]
    assert tree.num_tokens == 10 + 2 + 2 + 1 + 1 + 1


def test_same_prompt_again_is_a_repetition_and_equal_samples_stay_apart() -> None:
    tree = make_tree()
    first = call(tree, PROMPT, [1, 2])
    attachment = tree.attach(PROMPT)
    assert (attachment.attached, attachment.is_repeated) == ("branched", True)
    second = tree.add_sample(attachment, sampled([1, 2]))
    assert second is not None and second is not first
    (group,) = tree.answer()
    assert kinds(group) == [(True, [1, 2]), (True, [1, 2])]
    assert group.leaves == [first.id, second.id]


def test_prompt_follows_the_preferred_of_two_equal_samples() -> None:
    tree = make_tree()
    first, second = call(tree, PROMPT, [1, 2]), call(tree, PROMPT, [1, 2])
    continued = [*PROMPT, 1, 2, 50]
    assert call(tree, continued, [3], first).path()[1] is first
    assert call(tree, continued, [3], second).path()[1] is second
    assert call(tree, [*continued, 51], [4]).path()[1] is second, "the latest, by default"


def test_edited_sample_is_split_where_the_edit_begins() -> None:
    """The tokens before the edit stay sampled, with their own logprobs and versions."""
    tree = make_tree()
    edited = call(tree, PROMPT, [1, 2, 3])
    call(tree, [*PROMPT, 1, 9], [4])
    (group,) = tree.answer()
    assert group.segments is not None
    head, tail, context, _ = group.segments
    assert kinds(group) == [(True, [1]), (True, [2, 3]), (False, [9]), (True, [4])]
    assert (head.logprobs, tail.logprobs) == ([-1.0], [-2.0, -3.0])
    assert (head.versions[0].end, tail.versions[0].end) == (1, 2)
    assert head.support is not None and tail.support is not None
    assert (head.finish_reason, tail.finish_reason) == ("cut", "stop")
    assert (tail.id, tail.parent, context.parent) == (edited.id, head.id, head.id)
    assert (context.logprobs, context.versions, context.finish_reason) == ([], [], "cut")
    assert edited.path()[-1] is edited and tree.token_ids(edited) == [*PROMPT, 1, 2, 3]


def test_prompt_that_ends_inside_a_sample_continues_there() -> None:
    tree = make_tree()
    call(tree, PROMPT, [1, 2, 3])
    attachment = tree.attach([*PROMPT, 1, 2])
    assert (attachment.attached, attachment.num_new_context_tokens) == ("branched", 0)
    assert not attachment.is_repeated
    tree.add_sample(attachment, sampled([7]))
    assert kinds(tree.answer()[0]) == [(True, [1, 2]), (True, [3]), (True, [7])]


def test_prompt_with_few_shared_tokens_is_a_root_of_its_own() -> None:
    tree = make_tree()
    call(tree, PROMPT, [1])
    attachment = tree.attach([*PROMPT[:3], 9, 9])
    assert (attachment.attached, attachment.num_new_context_tokens) == ("root", 5)
    tree.add_sample(attachment, sampled([2]))
    groups = tree.answer()
    assert [group.index for group in groups] == [0, 1]
    assert [group.prompt_token_ids for group in groups] == [PROMPT, [*PROMPT[:3], 9, 9]]


def test_prompt_that_shares_a_long_beginning_splits_the_root() -> None:
    tree = make_tree()
    call(tree, PROMPT, [1])
    attachment = tree.attach([*PROMPT[:4], 9])
    assert (attachment.attached, attachment.num_new_context_tokens) == ("branched", 1)
    tree.add_sample(attachment, sampled([2]))
    (group,) = tree.answer()
    assert group.prompt_token_ids == PROMPT[:4]
    assert kinds(group) == [(False, PROMPT[4:]), (True, [1]), (False, [9]), (True, [2])]


def test_call_without_tokens_leaves_nothing_behind() -> None:
    tree = make_tree()
    tree.add_sample(tree.attach(PROMPT), sampled([]), finish="aborted")
    assert (tree.answer(), tree.num_segments, tree.num_tokens) == ([], 0, 0)
    call(tree, PROMPT, [1, 2])
    tree.detach(tree.attach([*PROMPT, 1, 2, 50]))
    assert kinds(tree.answer()[0]) == [(True, [1, 2])]
    assert tree.num_context_tokens == len(PROMPT)


def test_context_of_a_running_call_is_kept_when_another_call_fails() -> None:
    tree = make_tree()
    first, second = tree.attach(PROMPT), tree.attach(PROMPT)
    assert second.is_repeated
    tree.detach(first)
    assert tree.answer() == [], "a tree without samples is not in the answer"
    tree.add_sample(second, sampled([1]))
    assert kinds(tree.answer()[0]) == [(True, [1])]


def test_aborted_sample_is_kept_and_makes_the_tree_partial() -> None:
    tree = make_tree()
    call(tree, PROMPT, [1])
    assert tree.answer()[0].outcome == "done"
    aborted = call(tree, PROMPT, [2], finish="aborted")
    (group,) = tree.answer(is_complete=False)
    assert (group.outcome, group.leaves is not None and group.leaves[-1]) == ("partial", aborted.id)
    assert [segment.num_leaves for segment in group.segments or ()] == [None, None]


def test_split_context_keeps_the_place_of_a_running_call() -> None:
    tree = make_tree()
    running = tree.attach(PROMPT)
    call(tree, [*PROMPT[:6], 8], [1])
    sample = tree.add_sample(running, sampled([2]))
    assert sample is not None and tree.token_ids(sample) == [*PROMPT, 2]
