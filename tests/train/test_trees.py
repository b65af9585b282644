"""The gradient of a tree equals that of its paths as rows, with each segment prefilled once."""

from typing import Any

import numpy as np
import pytest
import torch

from coppice.rollout_results import Group, Segment, Tree
from coppice.train import (
    RowLogprobs,
    Schedule,
    Totals,
    TrainingTree,
    compute_prompt_kv,
    group_logprobs,
    grouped_backward,
    grpo_loss,
    packed_logprobs,
    token_mean,
)
from coppice.train.group_tree import max_row_tokens, subtrees_of
from coppice.train.packed_row import plan_subtree_passes, response_inputs
from tests.train.models import error, gradients, random_group, random_loss, tiny_model
from tests.train.naive import naive_backward, naive_logprobs

pytestmark = pytest.mark.slow

SCHEDULES: list[Schedule] = ["kept", "recomputed", "injected", "packed"]
CPU = torch.device("cpu")

# Lengths and parents. Not depth first: children of the first segment follow the second.
FORESTS: dict[str, tuple[list[int], list[int | None]]] = {
    "one": ([7], [None]),
    "fork": ([9, 4, 1, 6], [None, 0, 0, 0]),
    "deep": ([5, 11, 3, 1, 8, 1, 2, 12], [None, None, 0, 0, 2, 3, 2, 1]),
    "empty": ([0, 3, 0, 5, 4, 0, 1, 1], [None, 0, 0, 2, 2, 1, None, 6]),
    "chain": ([3, 1, 1, 4], [None, 0, 1, 2]),
}


def random_tree(name: str, *, prompt_tokens: int = 61) -> TrainingTree:
    lengths, parents = FORESTS[name]
    group = random_group(lengths, prompt_tokens=prompt_tokens)
    return TrainingTree(
        prompt=group.prompt,
        responses=group.responses,
        logprobs=group.logprobs,
        parents=tuple(parents),
        leaves=tuple(at for at in range(len(parents)) if at not in parents),
    )


@pytest.mark.parametrize("prompt_tokens", [1, 2, 61])
@pytest.mark.parametrize("name", FORESTS)
def test_every_schedule_gives_the_padded_gradient_of_a_tree(name: str, prompt_tokens: int) -> None:
    model, tree = tiny_model(), random_tree(name, prompt_tokens=prompt_tokens)
    naive_backward(model, tree, random_loss(tree))
    exact = gradients(model)
    for schedule in SCHEDULES:
        grouped_backward(model, tree, random_loss(tree), schedule=schedule, pass_tokens=10)
        assert error(gradients(model), exact) < 1e-5, schedule


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FORESTS)
def test_loss_over_paths_has_the_gradient_of_the_flattened_rows(
    name: str, schedule: Schedule
) -> None:
    """Plain GRPO on the leaves: the identity that relates trees to groups."""
    model, tree = tiny_model(), random_tree(name)
    rows = tree.flattened()
    gains = torch.randn(len(tree.leaves), generator=torch.Generator().manual_seed(3))
    weights = token_mean(Totals.of([rows]))

    def row_loss(found: RowLogprobs) -> torch.Tensor:
        return grpo_loss(found, advantages=gains, weights=weights, sampled=rows.logprobs)

    exact_loss = naive_backward(model, rows, row_loss)
    exact = gradients(model)
    report = grouped_backward(
        model, tree, lambda found: row_loss(tree.by_leaf(found)), schedule=schedule, pass_tokens=10
    )
    assert error(gradients(model), exact) < 1e-5
    assert report.loss == pytest.approx(exact_loss, rel=1e-4)


@pytest.mark.parametrize("name", FORESTS)
def test_logprobs_of_segments_equal_those_of_their_paths(name: str) -> None:
    model, tree = tiny_model(), random_tree(name)
    exact = naive_logprobs(model, tree)
    found = group_logprobs(model, tree, pass_tokens=10)
    [packed] = packed_logprobs(model, [tree])
    for each in (found, packed):
        assert (each.rows, each.lengths) == (exact.rows, exact.lengths)
        torch.testing.assert_close(each.logprobs, exact.logprobs)


def test_trees_and_groups_are_packed_together() -> None:
    model, tree, group = tiny_model(), random_tree("deep"), random_group((3, 9))
    found = packed_logprobs(model, [group, tree, group])
    for rows, each in zip(found, (group, tree, group), strict=True):
        torch.testing.assert_close(rows.logprobs, naive_logprobs(model, each).logprobs)


@pytest.mark.parametrize("schedule", ["recomputed", "injected"])
def test_gradient_of_a_tree_with_given_prompt_kv_is_exact(schedule: Schedule) -> None:
    model, tree = tiny_model("llama"), random_tree("deep")
    naive_backward(model, tree, random_loss(tree))
    exact = gradients(model)
    prompt_kv = compute_prompt_kv(model, tree)
    grouped_backward(model, tree, random_loss(tree), prompt_kv=prompt_kv, schedule=schedule)
    assert error(gradients(model), exact) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_model_supports_trees(reentrant: bool) -> None:
    model, tree = tiny_model(), random_tree("deep")
    naive_backward(model, tree, random_loss(tree))
    exact = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for pass_tokens in (10, 1000):
        grouped_backward(model, tree, random_loss(tree), pass_tokens=pass_tokens)
        assert error(gradients(model), exact) < 1e-5


def test_every_segment_is_computed_once() -> None:
    model, tree = tiny_model(), random_tree("deep")
    computed: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(
        lambda module, inputs: computed.append(inputs[0].numel())
    )
    grouped_backward(model, tree, random_loss(tree), schedule="kept", pass_tokens=10)
    roots, leaves = 2, len(tree.leaves)
    # Inputs of roots include the last prompt token; those of leaves exclude their own last one.
    assert sum(computed) == len(tree.prompt) - 1 + tree.num_tokens + roots - leaves


def test_root_and_all_segments_below_it_are_in_one_pass() -> None:
    tree = random_tree("deep")
    assert subtrees_of(tree) == [(0, 2, 4, 6, 3, 5), (1, 7)]
    assert plan_subtree_passes(tree, 10) == [(0, 2, 4, 6, 3, 5), (1, 7)]
    assert plan_subtree_passes(tree, 1000) == [(0, 2, 4, 6, 3, 5, 1, 7)]
    assert max_row_tokens(tree) == len(tree.prompt) + 11 + 12


def test_branches_extend_as_far_as_their_next_tokens() -> None:
    tree = random_tree("deep")
    spans = response_inputs(tree, subtrees_of(tree)[0], CPU).spans
    # The last prompt token and 5, then 3, 7 of 8, 1 of 2, 1, and nothing of 1.
    assert spans.lengths == (6, 3, 7, 1, 1, 0)
    assert [(b.start, b.stop, b.end) for b in spans.branches] == [(0, 6, 18), (6, 9, 17)]


def test_paths_concatenate_segments() -> None:
    tree = random_tree("deep")
    assert tree.leaves == (4, 5, 6, 7)
    assert tree.path(4) == (0, 2, 4)
    rows = tree.flattened()
    assert rows.logprobs is not None and tree.logprobs is not None
    assert torch.equal(rows.responses[0], torch.cat([tree.responses[at] for at in (0, 2, 4)]))
    assert torch.equal(rows.logprobs[3], torch.cat([tree.logprobs[at] for at in (1, 7)]))


def group_with_tree(tree: Tree | None) -> Group:
    return Group(
        id="g",
        index=0,
        outcome="done",
        exact=True,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        samples=(),
        tree=tree,
    )


def segment(name: str, parent: str | None, token_ids: list[int]) -> Segment:
    return Segment(
        id=name,
        parent=parent,
        depth=0,
        token_ids=np.array(token_ids, dtype=np.int64),
        logprobs=-np.array(token_ids, dtype=np.float32),
        entropy=None,
        finish_reason="stop",
        num_leaves=1,
        versions=(),
    )


def test_training_tree_is_made_from_the_answer_of_a_rollout() -> None:
    segments = (segment("a", None, [1, 2]), segment("b", "a", [3]), segment("c", "a", [4, 5]))
    answer = Tree(segments=segments, leaves=("c", "b"))
    tree = TrainingTree.of([7, 8, 9], group_with_tree(answer))
    assert (tree.parents, tree.leaves) == ((None, 0, 0), (2, 1))
    rows = tree.flattened()
    assert rows.logprobs is not None
    for row, sample in enumerate(answer.rows()):
        assert rows.responses[row].tolist() == sample.token_ids.tolist()
        assert rows.logprobs[row].tolist() == sample.logprobs.tolist()


def test_group_without_a_tree_is_refused() -> None:
    with pytest.raises(ValueError, match="the group is not a tree"):
        TrainingTree.of([7, 8, 9], group_with_tree(None))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"parents": (None,)}, "differs from the number of segments"),
        ({"parents": (None, 1)}, "smaller index"),
        ({"parents": (None, -1)}, "smaller index"),
        ({"leaves": (2,)}, "index of a segment"),
    ],
)
def test_inconsistent_tree_is_refused(parts: dict[str, Any], why: str) -> None:
    known: dict[str, Any] = {
        "prompt": torch.zeros(2),
        "responses": (torch.zeros(3), torch.zeros(1)),
        "parents": (None, 0),
        "leaves": (1,),
    }
    with pytest.raises(ValueError, match=why):
        TrainingTree(**known | parts)
