"""Responses with context tokens, such as the results of tools, which have no logprob."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coppice.rollout_results import Group, Tree
from coppice.train import (
    LogitAdjustments,
    Schedule,
    Totals,
    TrainingGroup,
    TrainingTree,
    group_logprobs,
    grouped_backward,
    grpo_loss,
    packed_logprobs,
    token_mean,
)
from coppice.train.group_tree import sampled_runs
from coppice.wire.columns.support import Support
from engine.sampling.support_encoding import encode_mask
from tests.train.models import error, gradients, random_group, random_loss, tiny_model
from tests.train.naive import naive_backward, naive_logprobs
from tests.train.test_sampled_distribution import random_support
from tests.train.test_trees import FORESTS, SCHEDULES, group_with_tree, random_tree, segment

ADJUSTED = LogitAdjustments(
    logit_bias={3: 4.0}, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3
)
LENGTHS = (9, 0, 14, 1, 6)


def random_masks(group: TrainingGroup) -> tuple[Tensor, ...]:
    """Masks with runs of some tokens; the last response is context only."""
    generator = torch.Generator().manual_seed(5)
    draws = (torch.rand(-(-length // 3), generator=generator) < 0.6 for length in group.lengths)
    masks = [
        draw.repeat_interleave(3)[:length]
        for draw, length in zip(draws, group.lengths, strict=True)
    ]
    return (*masks[:-1], torch.zeros_like(masks[-1]))


def masked(group: Any, masks: tuple[Tensor, ...] | None = None) -> Any:
    masks = random_masks(group) if masks is None else masks
    logprobs = tuple(all_[mask] for all_, mask in zip(group.logprobs, masks, strict=True))
    return replace(group, loss_masks=masks, logprobs=logprobs)


def adjusted(group: Any) -> Any:
    supports = tuple(random_support(group.targets(row), row) for row in range(len(group.responses)))
    return replace(group, support=supports, adjustments=ADJUSTED)


def context_tree(name: str = "deep") -> Any:
    """A tree of which every second segment is context."""
    tree = random_tree(name)
    masks = tuple(torch.full((n,), at % 2 == 0) for at, n in enumerate(tree.lengths))
    return masked(tree, masks)


def test_masked_logprobs_are_those_of_the_targets_only() -> None:
    model, group = tiny_model(), random_group(LENGTHS)
    whole = naive_logprobs(model, group)
    given = masked(group)
    found = naive_logprobs(model, given)
    expected = whole.logprobs[torch.cat(given.loss_masks)]
    torch.testing.assert_close(found.logprobs, expected)
    assert found.lengths == given.target_lengths
    assert sum(found.lengths) == given.num_targets < given.num_tokens


@pytest.mark.parametrize("with_adjustments", [False, True])
@pytest.mark.parametrize("name", ["rows", "tree", "context"])
def test_every_schedule_gives_the_padded_gradient(name: str, with_adjustments: bool) -> None:
    group: Any = context_tree()
    if name != "context":
        group = masked(random_group(LENGTHS) if name == "rows" else random_tree("deep"))
    group = adjusted(group) if with_adjustments else group
    model = tiny_model()
    exact_logprobs = naive_logprobs(model, group)
    naive_backward(model, group, random_loss(group))
    exact = gradients(model)
    for schedule in SCHEDULES:
        grouped_backward(model, group, random_loss(group), schedule=schedule, pass_tokens=10)
        assert error(gradients(model), exact) < 1e-5, schedule
    found, [packed] = group_logprobs(model, group), packed_logprobs(model, [group])
    for each in (found, packed):
        assert (each.rows, each.lengths) == (exact_logprobs.rows, exact_logprobs.lengths)
        torch.testing.assert_close(each.logprobs, exact_logprobs.logprobs, atol=3e-5, rtol=0)


def test_penalties_count_the_tokens_of_one_request() -> None:
    """Each run of targets has the logprobs of a response to all tokens before it."""
    model, group = tiny_model(), masked(random_group((12,)), (torch.arange(12) % 5 != 3,))
    group = replace(group, adjustments=ADJUSTED)
    rows = naive_logprobs(model, group)
    alone = [
        naive_logprobs(
            model,
            TrainingGroup(prompt=run.prompt, responses=(run.tokens,), adjustments=ADJUSTED),
        )
        for run in sampled_runs(group, 0)
    ]
    torch.testing.assert_close(rows.logprobs, torch.cat([each.logprobs for each in alone]))
    assert [len(each.logprobs) for each in alone] == [3, 4, 3]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_over_paths_has_the_gradient_of_the_flattened_rows(schedule: Schedule) -> None:
    model, tree = tiny_model(), context_tree()
    rows = tree.flattened()
    gains = torch.randn(len(tree.leaves), generator=torch.Generator().manual_seed(3))
    weights = token_mean(Totals.of([rows]))

    def row_loss(found: Any) -> Tensor:
        return grpo_loss(found, advantages=gains, weights=weights, sampled=rows.logprobs)

    naive_backward(model, rows, row_loss)
    exact = gradients(model)
    grouped_backward(
        model, tree, lambda found: row_loss(tree.by_leaf(found)), schedule=schedule, pass_tokens=10
    )
    assert error(gradients(model), exact) < 1e-5


def test_context_is_no_response() -> None:
    tree = context_tree("fork")
    assert Totals.of([tree]) == Totals(num_responses=2, num_tokens=sum(FORESTS["fork"][0][::2]))


def test_group_without_targets_has_no_gradient() -> None:
    group = random_group((4, 3))
    given = masked(group, tuple(torch.zeros(n, dtype=torch.bool) for n in group.lengths))
    report = grouped_backward(tiny_model(), given, random_loss(given))
    assert (report.loss, report.num_passes) == (0.0, 0)
    assert len(group_logprobs(tiny_model(), given).logprobs) == 0


def test_masks_of_other_lengths_are_refused() -> None:
    group = random_group((4, 3))
    with pytest.raises(ValueError, match="loss masks"):
        replace(group, loss_masks=(torch.ones(4, dtype=torch.bool),) * 2)
    with pytest.raises(ValueError, match="logprobs"):
        replace(group, loss_masks=tuple(torch.zeros(n, dtype=torch.bool) for n in group.lengths))


def whole_support(num_tokens: int) -> Support:
    return Support((encode_mask(np.ones(5, np.bool_)),) * num_tokens, 5)


def test_context_segments_of_an_answer_have_no_logprobs() -> None:
    first = replace(segment("a", None, [1, 2]), support=whole_support(2))
    tool = replace(segment("b", "a", [3]), sampled=False, logprobs=np.zeros(0, np.float32))
    second = replace(segment("c", "b", [4, 5]), support=whole_support(2))
    answer = Tree(segments=(first, tool, second), leaves=("c",))
    group = group_with_tree(answer)
    tree = TrainingTree.of([7, 8, 9], group)
    rows = TrainingGroup.of([7, 8, 9], replace(group, samples=answer.rows()))
    for found in (tree.flattened(), rows):
        assert found.loss_masks is not None and found.logprobs is not None
        assert found.responses[0].tolist() == [1, 2, 3, 4, 5]
        assert found.loss_masks[0].tolist() == [True, True, False, True, True]
        assert found.logprobs[0].tolist() == [-1, -2, -4, -5]
        assert found.support is not None and len(found.support[0]) == 4
    assert tree.num_targets == 4
    sampled_only = Tree(segments=(first,), leaves=("a",))
    assert TrainingTree.of([7, 8, 9], group_with_tree(sampled_only)).loss_masks is None


def test_penalties_of_adjacent_samples_are_refused() -> None:
    first = replace(segment("a", None, [1, 2]), finish_reason="length")
    tree = Tree(segments=(first, segment("b", "a", [3])), leaves=("b",))
    with pytest.raises(ValueError, match="penalties cannot be replayed"):
        TrainingTree.of([7, 8, 9], group_with_tree(tree), adjustments=ADJUSTED)
    cut = replace(first, finish_reason="cut")
    whole = Tree(segments=(cut, tree.segments[1]), leaves=("b",))
    for given, adjustments in ((tree, LogitAdjustments()), (whole, ADJUSTED)):
        TrainingTree.of([7, 8, 9], group_with_tree(given), adjustments=adjustments)


def session_tree() -> Tree:
    """A sample split before its hidden end, and two samples to a prompt that continues it."""
    parts = (
        replace(segment("a", None, [1, 2]), finish_reason="cut"),
        segment("end", "a", [2]),
        replace(segment("b", "a", [1, 1]), finish_reason="cut"),
        segment("b-end", "b", [1]),
        segment("c", "b", [1, 2, 1]),
        segment("d", "a", [2, 2]),
    )
    return Tree(segments=parts, leaves=("end", "b-end", "c", "d"), is_session=True)


def test_each_request_of_a_session_has_penalties_of_its_own() -> None:
    """Logprobs as if each sample were the response to a prompt with all tokens before it."""
    model = tiny_model()
    tree = TrainingTree.of([7, 8, 9], group_with_tree(session_tree()), adjustments=ADJUSTED)
    requests = {
        (0, 1): ([7, 8, 9], [1, 2, 2]),
        (2, 3): ([7, 8, 9, 1, 2], [1, 1, 1]),
        (4,): ([7, 8, 9, 1, 2, 1, 1], [1, 2, 1]),
        (5,): ([7, 8, 9, 1, 2], [2, 2]),
    }
    found = naive_logprobs(model, tree).split()
    for segments, (prompt, response) in requests.items():
        alone = TrainingGroup(
            prompt=torch.tensor(prompt),
            responses=(torch.tensor(response),),
            adjustments=ADJUSTED,
        )
        expected = naive_logprobs(model, alone).logprobs
        torch.testing.assert_close(torch.cat([found[at] for at in segments]), expected)
    fast = group_logprobs(model, tree)
    torch.testing.assert_close(fast.logprobs, torch.cat(found), atol=3e-5, rtol=0)
    rows = group_logprobs(model, tree.flattened())
    by_leaf = tree.by_leaf(fast)
    torch.testing.assert_close(rows.logprobs, by_leaf.logprobs, atol=3e-5, rtol=0)


def test_request_starts_of_other_responses_are_refused() -> None:
    with pytest.raises(ValueError, match="request starts"):
        replace(random_group((4, 3)), request_starts=((1,),))


def test_logprobs_without_context_are_not_copied() -> None:
    answer = Tree(segments=(segment("a", None, [1, 2]),), leaves=("a",))
    [sample] = answer.rows()
    given = replace(group_with_tree(answer), samples=(sample,))
    [logprobs] = TrainingGroup.of([7, 8, 9], given).logprobs or ()
    assert np.shares_memory(logprobs.numpy(), sample.logprobs)


def test_a_prompt_with_images_is_refused() -> None:
    """Its token ids alone would give logprobs of another prompt."""
    group = Group(
        id="0",
        index=0,
        outcome="done",
        exact=True,
        num_prompt_tokens=2,
        num_cached_tokens=0,
        samples=(),
        num_images=1,
    )
    with pytest.raises(ValueError, match="images"):
        TrainingGroup.of([1, 2], group)
