"""Equivalence of training on a tree's segments and on its rows, where documented."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from coppice import Tree, segment_advantages, segment_weights
from coppice.credit import Scheme, Weighting
from coppice.train import Totals, TrainingGroup, advantages, grpo_loss, token_mean
from coppice.train.training_group import RowLogprobs
from tests.client.trees import tree
from tests.train.models import tiny_model
from tests.train.naive import naive_backward

PROMPT = torch.tensor([3, 1, 4, 1, 5])
REWARDS = [1.0, 0.0, 3.0, 2.5, 4.0]


def rows_of(grown: Tree) -> TrainingGroup:
    responses = [torch.from_numpy(row.token_ids) for row in grown.rows()]
    return TrainingGroup(prompt=PROMPT, responses=tuple(responses))


def gradient(model: Any, backward: Callable[[], object]) -> Tensor:
    model.zero_grad()
    backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def plain_grpo(model: Any, grown: Tree) -> Tensor:
    group = rows_of(grown)
    gains = advantages(torch.tensor(REWARDS, dtype=torch.float64))
    weights = token_mean(Totals.of([group]))

    def loss(rows: RowLogprobs) -> Tensor:
        return grpo_loss(rows, advantages=gains, weights=weights, clip=None)

    return gradient(model, lambda: naive_backward(model, group, loss))


def by_segments(model: Any, grown: Tree, scheme: Scheme, weighting: Weighting) -> Tensor:
    """Each segment's tokens once, after their own prefix, with the segment's advantage."""
    gains = segment_advantages(grown, REWARDS, scheme)
    weights = segment_weights(grown, weighting)
    num_row_tokens = sum(len(row.token_ids) for row in grown.rows())

    def backward() -> None:
        for segment in grown.segments:
            path = [torch.from_numpy(s.token_ids) for s in grown.path(segment.id)]
            ids = torch.cat([PROMPT, *path])
            first = len(ids) - len(segment.token_ids)
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)[first - 1 : -1]
            picked = logprobs.gather(1, ids[first:, None]).sum()
            loss = -picked * gains[segment.id] * weights[segment.id] / num_row_tokens
            loss.backward()

    return gradient(model, backward)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_leaf_grpo_weighted_per_leaf_equals_grpo_on_the_rows() -> None:
    model, grown = tiny_model().double(), tree()
    found = by_segments(model, grown, "leaf_grpo", "per_leaf")
    assert distance(found, plain_grpo(model, grown)) < 1e-6  # norms are computed in float32


@pytest.mark.parametrize("weighting", ["once", "sqrt"])
def test_another_weighting_is_another_objective(weighting: Weighting) -> None:
    model, grown = tiny_model().double(), tree()
    found = by_segments(model, grown, "leaf_grpo", weighting)
    assert distance(found, plain_grpo(model, grown)) > 0.05
