"""Predicted acceptance is calibrated against outcomes."""

import numpy as np
import pytest

from engine.speculation.calibration import MAX_BIN_COUNT, DraftCalibration

PREDICTED = np.array([0.15, 0.3, 0.6, 0.97])


def trained_calibration(
    predicted: float, actual: float, number: int, calibration: DraftCalibration | None = None
) -> DraftCalibration:
    calibration = calibration or DraftCalibration()
    calibration.update(np.full(number, predicted), np.arange(number) < actual * number)
    return calibration


def test_without_outcomes_predicted_acceptance_is_zero() -> None:
    assert DraftCalibration().expected(PREDICTED).tolist() == [0.0] * 4
    calibrated = trained_calibration(0.97, 0.97, 200).expected(PREDICTED)
    assert calibrated[:3].tolist() == [0.0] * 3
    assert 0.9 < calibrated[3] < 0.97


@pytest.mark.parametrize("number", [10, 40, 160])
def test_fewer_outcomes_give_a_lower_prediction(number: int) -> None:
    few, many = (
        trained_calibration(0.6, 0.6, each).expected(PREDICTED)[2] for each in (number, 2 * number)
    )
    assert few < many < 0.6


def test_overestimates_are_lowered_and_underestimates_raised() -> None:
    assert trained_calibration(0.6, 0.2, 400).expected(PREDICTED)[2] == pytest.approx(0.2, abs=0.04)
    assert trained_calibration(0.6, 0.9, 400).expected(PREDICTED)[2] == pytest.approx(0.9, abs=0.04)
    assert trained_calibration(0.5, 1.0, 400).expected(np.array([0.5])).max() <= 1.0


def test_old_outcomes_are_discounted() -> None:
    calibration = trained_calibration(0.6, 0.9, int(MAX_BIN_COUNT))
    for _ in range(8):
        trained_calibration(0.6, 0.1, int(MAX_BIN_COUNT), calibration)
    assert calibration.expected(PREDICTED)[2] < 0.12
