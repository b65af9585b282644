"""Losses equal their formulas, for any split into passes."""

import math

import pytest
import torch
from torch import Tensor

from coppice.train import (
    Clip,
    RowLogprobs,
    TokenWeights,
    Totals,
    advantages,
    dr_grpo,
    grouped_backward,
    grpo_loss,
    kl_estimate,
    reverse_kl_loss,
    sequence_mean,
    token_mean,
)
from coppice.train.packed_row import plan_passes
from tests.train.models import LENGTHS, error, gradients, random_group, tiny_model
from tests.train.naive import naive_backward

pytestmark = pytest.mark.slow

TOTALS = Totals(num_responses=4, num_tokens=10)


def rows_of(*logprobs: list[float]) -> RowLogprobs:
    tensors = [torch.tensor(row, dtype=torch.float64) for row in logprobs]
    return RowLogprobs(
        logprobs=torch.cat(tensors).requires_grad_(),
        rows=tuple(range(len(tensors))),
        lengths=tuple(len(row) for row in tensors),
    )


def test_advantages_are_centred_and_scaled() -> None:
    rewards = torch.tensor([0.0, 1.0, 1.0, 4.0])
    assert advantages(rewards, by_deviation=False).tolist() == [-1.5, -0.5, -0.5, 2.5]
    scaled = advantages(rewards)
    assert scaled.mean().item() == pytest.approx(0, abs=1e-6)
    assert scaled.std().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.5]])
def test_equal_rewards_have_zero_advantage(rewards: list[float]) -> None:
    assert not advantages(torch.tensor(rewards)).any()


@pytest.mark.parametrize(
    ("weights", "exact"),
    [
        (token_mean(TOTALS), [0.1, 0.1]),
        (sequence_mean(TOTALS), [1 / 4 / 2, 1 / 4 / 3]),
        (dr_grpo(TOTALS, max_tokens=5), [1 / 20, 1 / 20]),
    ],
    ids=["token", "sequence", "dr"],
)
def test_normalizers_weigh_tokens(weights: TokenWeights, exact: list[float]) -> None:
    assert weights(torch.tensor([2, 3])).tolist() == pytest.approx(exact)
    rows = rows_of([-1.0, -2.0], [-1.0, -1.0, -3.0])
    loss = grpo_loss(rows, advantages=torch.tensor([1.0, -2.0]), weights=weights)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = [-1 * exact[0]] * 2 + [2 * exact[1]] * 3
    assert rows.logprobs.grad is not None
    assert rows.logprobs.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gain", "moves"),
    [
        (1.1, 1.0, 1.1, True),
        (1.5, 1.0, 1.3, False),
        (1.5, -1.0, -1.5, True),
        (0.5, 1.0, 0.5, True),
        (0.5, -1.0, -0.9, False),
    ],
)
def test_ratio_is_clipped_on_both_sides(
    ratio: float, advantage: float, gain: float, moves: bool
) -> None:
    rows = rows_of([math.log(0.1 * ratio)])
    old = [torch.tensor([math.log(0.1)], dtype=torch.float64)]
    loss = grpo_loss(
        rows,
        advantages=torch.tensor([advantage]),
        weights=token_mean(Totals(num_responses=1, num_tokens=1)),
        old=old,
        clip=Clip(low=0.1, high=0.3),
    )
    assert loss.item() == pytest.approx(-gain)
    loss.backward()  # type: ignore[no-untyped-call]
    assert rows.logprobs.grad is not None
    assert bool(rows.logprobs.grad.any()) == moves


def test_without_clip_the_ratio_is_unbounded() -> None:
    rows = rows_of([math.log(0.5)])
    old = [torch.tensor([math.log(0.1)], dtype=torch.float64)]
    one = token_mean(Totals(num_responses=1, num_tokens=1))
    loss = grpo_loss(rows, advantages=torch.ones(1), weights=one, old=old, clip=None)
    assert loss.item() == pytest.approx(-5)


@pytest.mark.parametrize(("sampled", "weight"), [(0.2, 0.5), (0.1, 1.0), (0.01, 2.0)])
def test_importance_weights_are_truncated(sampled: float, weight: float) -> None:
    rows = rows_of([math.log(0.1)])
    loss = grpo_loss(
        rows,
        advantages=torch.ones(1),
        weights=token_mean(Totals(num_responses=1, num_tokens=1)),
        sampled=[torch.tensor([math.log(sampled)], dtype=torch.float64)],
    )
    assert loss.item() == pytest.approx(-weight)
    loss.backward()  # type: ignore[no-untyped-call]
    assert rows.logprobs.grad is not None
    assert rows.logprobs.grad.item() == pytest.approx(-weight)


def test_kl_pulls_towards_the_reference() -> None:
    rows = rows_of([math.log(0.4)])
    reference = [torch.tensor([math.log(0.1)], dtype=torch.float64)]
    loss = grpo_loss(
        rows,
        advantages=torch.zeros(1),
        weights=token_mean(Totals(num_responses=1, num_tokens=1)),
        reference=reference,
        kl=0.5,
    )
    assert loss.item() == pytest.approx(0.5 * (0.25 - math.log(0.25) - 1))
    loss.backward()  # type: ignore[no-untyped-call]
    assert rows.logprobs.grad is not None
    assert rows.logprobs.grad.item() == pytest.approx(0.5 * (1 - 0.25))


def test_kl_estimate_is_non_negative_and_unbiased() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    estimate = kl_estimate(p.log(), q.log())
    assert (estimate >= 0).all()
    assert (p * estimate).sum().item() == pytest.approx((p * (p / q).log()).sum().item())


@pytest.mark.parametrize("name", ["token", "sequence", "dr"])
@pytest.mark.parametrize("pass_tokens", [1, 60, 1000])
def test_any_pass_size_gives_the_same_gradient(name: str, pass_tokens: int) -> None:
    """With everything enabled: clip, both kinds of weights, and KL to a reference."""
    model, group = tiny_model(), random_group()
    totals = Totals.of([group, random_group((3, 4))])
    weights = {
        "token": token_mean(totals),
        "sequence": sequence_mean(totals),
        "dr": dr_grpo(totals, max_tokens=64),
    }[name]
    generator = torch.Generator().manual_seed(5)
    rewards = torch.rand(len(LENGTHS), generator=generator)
    reference = [-4 + torch.randn(length, generator=generator) for length in LENGTHS]

    def loss(rows: RowLogprobs) -> Tensor:
        return grpo_loss(
            rows,
            advantages=advantages(rewards),
            weights=weights,
            sampled=group.logprobs,
            old=[-3.5 + 0 * tensor for tensor in reference],
            reference=reference,
            clip=Clip(low=0.2, high=0.28),
            kl=0.05,
        )

    exact_loss = naive_backward(model, group, loss)
    exact = gradients(model)
    report = grouped_backward(model, group, loss, schedule="kept", pass_tokens=pass_tokens)
    assert report.loss == pytest.approx(exact_loss, rel=1e-4)
    assert error(gradients(model), exact) < 1e-5


def test_inputs_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="number of values"):
        rows_of([-1.0, -2.0]).pick([torch.zeros(3)])


@pytest.mark.parametrize(
    ("lengths", "pass_tokens", "passes"),
    [
        ([100] * 8, 1024, [tuple(range(8))]),
        ([100] * 8, 500, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ([512] * 4, 1024, [(0, 1), (2, 3)]),
        ([5, 2000, 5], 1024, [(0,), (1,), (2,)]),
        ([0, 3, 0], 2, [(1,)]),
        ([0, 0], 10, []),
    ],
)
def test_passes_are_bounded_and_balanced(
    lengths: list[int], pass_tokens: int, passes: list[tuple[int, ...]]
) -> None:
    assert plan_passes(lengths, pass_tokens) == passes


def test_pass_of_zero_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="pass_tokens must be at least 1"):
        plan_passes([1], 0)


def test_reverse_kl_loss_has_the_gradient_of_the_divergence_in_expectation() -> None:
    torch.manual_seed(2)
    logits, teacher = torch.randn(2, 5, dtype=torch.float64)
    logits.requires_grad_()
    own, its = logits.log_softmax(0), teacher.log_softmax(0)
    [exact] = torch.autograd.grad((own.exp() * (own - its)).sum(), logits, retain_graph=True)
    expected = torch.zeros_like(exact)
    for token, probability in enumerate(own.detach().exp()):
        rows = RowLogprobs(logprobs=own[token : token + 1], rows=(0,), lengths=(1,))
        loss = reverse_kl_loss(
            rows, teacher=[its[token : token + 1]], weights=lambda lengths: torch.ones(1)
        )
        expected += probability * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    torch.testing.assert_close(expected, exact)
