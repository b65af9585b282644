"""What drafts promise is believed as far as it was kept."""

import numpy as np
import pytest

from engine.speculation.calibration import REMEMBERED, Trust

PROMISED = np.array([0.15, 0.3, 0.6, 0.97])


def taught(promised: float, kept: float, number: int, trust: Trust | None = None) -> Trust:
    trust = trust or Trust()
    trust.learn(np.full(number, promised), np.arange(number) < kept * number)
    return trust


def test_nothing_is_believed_of_what_was_never_seen() -> None:
    assert Trust().worth(PROMISED).tolist() == [0.0] * 4
    believed = taught(0.97, 0.97, 200).worth(PROMISED)
    assert believed[:3].tolist() == [0.0] * 3
    assert 0.9 < believed[3] < 0.97


@pytest.mark.parametrize("number", [10, 40, 160])
def test_the_less_was_seen_the_less_is_believed(number: int) -> None:
    few, many = (taught(0.6, 0.6, each).worth(PROMISED)[2] for each in (number, 2 * number))
    assert few < many < 0.6


def test_promises_that_are_not_kept_are_cut_and_those_outdone_are_raised() -> None:
    assert taught(0.6, 0.2, 400).worth(PROMISED)[2] == pytest.approx(0.2, abs=0.04)
    assert taught(0.6, 0.9, 400).worth(PROMISED)[2] == pytest.approx(0.9, abs=0.04)
    assert taught(0.5, 1.0, 400).worth(np.array([0.5])).max() <= 1.0


def test_what_was_long_ago_is_forgotten() -> None:
    trust = taught(0.6, 0.9, int(REMEMBERED))
    for _ in range(8):
        taught(0.6, 0.1, int(REMEMBERED), trust)
    assert trust.worth(PROMISED)[2] < 0.12
