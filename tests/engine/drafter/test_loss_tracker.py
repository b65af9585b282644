"""Detection of a change in the training loss."""

import random
from collections.abc import Iterator

from engine.drafter.trainer.model_trainer import WINDOW_STEPS, LossTracker


def rows(mean: float, number: int) -> Iterator[float]:
    """Losses of rows of a thousand tokens each, with noise."""
    chance = random.Random(number)
    return (mean * (1 + chance.gauss(0, 0.05)) for _ in range(number))


def settled(loss_tracker: LossTracker, losses: Iterator[float]) -> list[bool]:
    found = []
    for loss in losses:
        loss_tracker.update(loss)
        found.append(loss_tracker.has_converged)
    return found


def test_constant_loss_settles_once_it_is_estimated() -> None:
    found = settled(LossTracker(), rows(1.2, 4 * WINDOW_STEPS))
    assert not any(found[: WINDOW_STEPS - 1])
    assert all(found[WINDOW_STEPS:])


def test_other_weights_are_news_until_they_are_learned() -> None:
    loss_tracker = LossTracker()
    settled(loss_tracker, rows(1.2, 2 * WINDOW_STEPS))
    falling = (3.0 - 1.8 * step / 1500 for step in range(1500))
    found = settled(loss_tracker, falling)
    assert sum(found[20:]) < 20  # on the way up, the trailing mean lags behind
    assert all(settled(loss_tracker, rows(1.2, 2 * WINDOW_STEPS))[WINDOW_STEPS:])


def test_mean_covers_all_steps_while_there_are_few() -> None:
    loss_tracker = LossTracker()
    for loss in (4.0, 2.0, 3.0):
        loss_tracker.update(loss)
    assert loss_tracker.smoothed == 3.0
