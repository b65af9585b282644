"""The guard suspends drafts that lose, and not because of noise in the measured step times."""

import numpy as np

from engine.speculation.loss_guard import ALLOWANCE, LossGuard

NOISE, NUM_STEPS = 0.15, 5000


def num_steps_to_pause(gain: float) -> int | None:
    """Number of steps until a pause, if steps with drafts gain `gain` of a step on average."""
    guard, chance = LossGuard(), np.random.default_rng(3)
    for number in range(NUM_STEPS):
        guard.record(gain + NOISE * chance.normal())
        if guard.is_resting:
            return number
    return None


def test_noise_alone_does_not_pause_drafts() -> None:
    assert num_steps_to_pause(0.0) is None


def test_loss_above_the_allowance_pauses_drafts() -> None:
    assert num_steps_to_pause(-2 * ALLOWANCE) is not None
