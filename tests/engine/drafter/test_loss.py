"""What a drafter is to say, against sums that are written out place by place."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from engine.drafter.trainer.loss import loss_of
from engine.drafter.trainer.packing import IGNORED, Packed, Soft

NUM_TOKENS, VOCAB = 6, 11
LABELS = [IGNORED, 3, 4, IGNORED, 5, 6]
LISTED = {2: {4: 0.5, 7: 0.3, 1: 0.1}, 4: {9: 1.0}, 5: {6: 0.2, 0: 0.05}}
"""By place. At the second the token that came is not among the likeliest that were kept."""


def row(listed: dict[int, dict[int, float]]) -> Packed:
    none = torch.zeros(NUM_TOKENS, dtype=torch.long)
    soft = Soft(
        places_R=torch.tensor(list(listed)),
        tokens_RK=torch.tensor([_padded(list(each), list(each)[0]) for each in listed.values()]),
        masses_RK=torch.tensor([_padded(list(each.values()), 0.0) for each in listed.values()]),
    )
    return Packed(none, torch.tensor(LABELS), none, none, soft if listed else None)


def _padded(values: list[float], rest: float) -> list[float]:
    return values + [rest] * (3 - len(values))


def logits() -> torch.Tensor:
    values = 2 * torch.randn(NUM_TOKENS, VOCAB, generator=torch.Generator().manual_seed(3))
    return values.requires_grad_()


def reference(logits_TV: torch.Tensor, listed: dict[int, dict[int, float]]) -> torch.Tensor:
    """In float64, one outcome after the other."""
    total, number = torch.zeros((), dtype=torch.float64), 0
    for place, label in enumerate(LABELS):
        if label == IGNORED:
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
def test_the_loss_and_what_it_asks_for_are_those_of_the_sums(
    listed: dict[int, dict[int, float]],
) -> None:
    fast, slow = logits(), logits()
    loss = loss_of(fast, row(listed))
    wanted = reference(slow, listed)
    loss.backward()  # type: ignore[no-untyped-call]
    wanted.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss.double(), wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(fast.grad, slow.grad, atol=1e-6, rtol=1e-4)


def test_where_nothing_was_recorded_it_is_cross_entropy() -> None:
    values = logits()
    labels = torch.tensor(LABELS)
    torch.testing.assert_close(
        loss_of(values, row({})), cross_entropy(values, labels, ignore_index=IGNORED)
    )


def test_a_token_that_was_certain_is_a_label() -> None:
    certain = {place: {label: 1.0} for place, label in enumerate(LABELS) if label != IGNORED}
    values = logits()
    torch.testing.assert_close(loss_of(values, row(certain)), loss_of(values, row({})))


def test_it_is_the_mean_of_the_losses_of_what_could_have_come() -> None:
    """With all of them listed: a sum over draws, without the chance in it."""
    values, law = logits(), torch.softmax(torch.randn(3), 0)
    drawn = torch.stack([cross_entropy(values[2], torch.tensor(token)) for token in (4, 7, 1)])
    listed = {2: dict(zip((4, 7, 1), law.tolist(), strict=True))}
    others = [cross_entropy(values[p], torch.tensor(LABELS[p])) for p in (1, 4, 5)]
    wanted = ((law * drawn).sum() + sum(others)) / 4
    torch.testing.assert_close(loss_of(values, row(listed)), wanted, atol=1e-5, rtol=1e-5)


def test_a_drafter_that_is_sure_of_the_listed_ones_has_a_finite_loss() -> None:
    values = torch.full((NUM_TOKENS, VOCAB), -200.0)
    values[:, 4] = 200.0
    values.requires_grad_()
    loss = loss_of(values, row({2: {4: 0.5}}))
    loss.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(loss.item())
    assert values.grad is not None and values.grad.isfinite().all()
