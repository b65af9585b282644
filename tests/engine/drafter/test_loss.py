"""The drafter's loss, against sums that are written out position by position."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from engine.drafter.trainer.model_trainer import compute_loss
from engine.drafter.trainer.packing import IGNORE_INDEX, PackedBatch, SoftTargets

NUM_TOKENS, VOCAB = 6, 11
LABELS = [IGNORE_INDEX, 3, 4, IGNORE_INDEX, 5, 6]
LISTED = {2: {4: 0.5, 7: 0.3, 1: 0.1}, 4: {9: 1.0}, 5: {6: 0.2, 0: 0.05}}
"""By position. At the second, the sampled token is not among the recorded top-k."""


def row(listed: dict[int, dict[int, float]]) -> PackedBatch:
    none = torch.zeros(NUM_TOKENS, dtype=torch.long)
    soft_targets = SoftTargets(
        positions_R=torch.tensor(list(listed)),
        tokens_RK=torch.tensor([_padded(list(each), list(each)[0]) for each in listed.values()]),
        probs_RK=torch.tensor([_padded(list(each.values()), 0.0) for each in listed.values()]),
    )
    return PackedBatch(none, torch.tensor(LABELS), none, none, soft_targets if listed else None)


def _padded(values: list[float], rest: float) -> list[float]:
    return values + [rest] * (3 - len(values))


def logits() -> torch.Tensor:
    values = 2 * torch.randn(NUM_TOKENS, VOCAB, generator=torch.Generator().manual_seed(3))
    return values.requires_grad_()


def reference(logits_TV: torch.Tensor, listed: dict[int, dict[int, float]]) -> torch.Tensor:
    """In float64, one outcome after the other."""
    total, number = torch.zeros((), dtype=torch.float64), 0
    for place, label in enumerate(LABELS):
        if label == IGNORE_INDEX:
            continue
        said = logits_TV[place].double().softmax(-1)
        wanted = listed.get(place, {label: 1.0})
        for token, mass in wanted.items():
            total = total - mass * said[token].log()
        other = 1 - sum(wanted.values())
        if other > 1e-9:
            unlisted = [token for token in range(VOCAB) if token not in wanted]
            total = total - other * said[unlisted].sum().log()
        number += 1
    return total / number


@pytest.mark.parametrize("listed", [LISTED, {2: LISTED[2]}, {}])
def test_loss_and_gradient_equal_the_explicit_sums(
    listed: dict[int, dict[int, float]],
) -> None:
    fast, slow = logits(), logits()
    loss = compute_loss(fast, row(listed))
    wanted = reference(slow, listed)
    loss.backward()  # type: ignore[no-untyped-call]
    wanted.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss.double(), wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(fast.grad, slow.grad, atol=1e-6, rtol=1e-4)


def test_without_recorded_top_k_it_is_cross_entropy() -> None:
    values = logits()
    labels = torch.tensor(LABELS)
    torch.testing.assert_close(
        compute_loss(values, row({})), cross_entropy(values, labels, ignore_index=IGNORE_INDEX)
    )


def test_certain_token_is_a_label() -> None:
    certain = {place: {label: 1.0} for place, label in enumerate(LABELS) if label != IGNORE_INDEX}
    values = logits()
    torch.testing.assert_close(compute_loss(values, row(certain)), compute_loss(values, row({})))


def test_loss_is_the_mean_over_possible_outcomes() -> None:
    """With all outcomes listed: an expectation over samples, without sampling noise."""
    values, distribution = logits(), torch.softmax(torch.randn(3), 0)
    drawn = torch.stack([cross_entropy(values[2], torch.tensor(token)) for token in (4, 7, 1)])
    listed = {2: dict(zip((4, 7, 1), distribution.tolist(), strict=True))}
    others = [cross_entropy(values[p], torch.tensor(LABELS[p])) for p in (1, 4, 5)]
    wanted = ((distribution * drawn).sum() + sum(others)) / 4
    torch.testing.assert_close(compute_loss(values, row(listed)), wanted, atol=1e-5, rtol=1e-5)


def test_overconfident_drafter_has_a_finite_loss() -> None:
    values = torch.full((NUM_TOKENS, VOCAB), -200.0)
    values[:, 4] = 200.0
    values.requires_grad_()
    loss = compute_loss(values, row({2: {4: 0.5}}))
    loss.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(loss.item())
    assert values.grad is not None and values.grad.isfinite().all()
