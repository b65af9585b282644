"""How likely drafts are to be accepted, place by place."""

import numpy as np
import pytest

from engine.drafter.core.acceptance import Acceptance


def test_each_place_has_its_own_rate_among_those_that_were_reached() -> None:
    acceptance = Acceptance(4)
    for _ in range(300):
        acceptance.verified(3, 3)
        acceptance.verified(3, 1)
    first, second, third, fourth = acceptance.probabilities().tolist()
    assert first == pytest.approx(1.0, abs=0.02)
    assert second == pytest.approx(0.5, abs=0.02)
    assert third == pytest.approx(1.0, abs=0.02)
    assert fourth == third, "no draft was as long"


def test_a_refused_first_token_says_nothing_of_those_behind_it() -> None:
    acceptance = Acceptance(2)
    for _ in range(300):
        acceptance.verified(2, 0)
    first, second = acceptance.probabilities().tolist()
    assert first < 0.02
    assert second == pytest.approx(first)


def test_what_is_recent_counts_and_what_other_weights_said_hardly() -> None:
    acceptance = Acceptance(1)
    for _ in range(600):
        acceptance.step()
        acceptance.verified(1, 0)
    for _ in range(400):
        acceptance.step()
        acceptance.verified(1, 1)
    assert acceptance.probabilities()[0] > 0.9
    acceptance.weights_changed()
    for _ in range(20):
        acceptance.verified(1, 0)
    assert acceptance.probabilities()[0] < 0.4


def test_before_anything_is_known_every_place_is_worth_a_try() -> None:
    assert np.all(Acceptance(3).probabilities() == 0.5)
