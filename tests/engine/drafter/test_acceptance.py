"""Acceptance probability of drafts, by position."""

import numpy as np
import pytest

from engine.drafter.core.draft_length import Acceptance


def test_each_position_has_its_rate_among_tokens_that_were_reached() -> None:
    acceptance = Acceptance(4)
    for _ in range(300):
        acceptance.record_verified(3, 3)
        acceptance.record_verified(3, 1)
    first, second, third, fourth = acceptance.probabilities().tolist()
    assert first == pytest.approx(1.0, abs=0.02)
    assert second == pytest.approx(0.5, abs=0.02)
    assert third == pytest.approx(1.0, abs=0.02)
    assert fourth == third, "no draft was as long"


def test_rejected_first_token_says_nothing_about_later_positions() -> None:
    acceptance = Acceptance(2)
    for _ in range(300):
        acceptance.record_verified(2, 0)
    first, second = acceptance.probabilities().tolist()
    assert first < 0.02
    assert second == pytest.approx(first)


def test_recent_outcomes_count_and_those_of_other_weights_hardly() -> None:
    acceptance = Acceptance(1)
    for _ in range(600):
        acceptance.decay()
        acceptance.record_verified(1, 0)
    for _ in range(400):
        acceptance.decay()
        acceptance.record_verified(1, 1)
    assert acceptance.probabilities()[0] > 0.9
    acceptance.on_weights_changed()
    for _ in range(20):
        acceptance.record_verified(1, 0)
    assert acceptance.probabilities()[0] < 0.4


def test_unknown_positions_are_tried() -> None:
    assert np.all(Acceptance(3).probabilities() == 0.5)
