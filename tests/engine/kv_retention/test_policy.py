"""Policy of KV retention: predicted returns of paused sessions, and values of their blocks."""

import random
import statistics

import pytest

from engine.kv_retention.policy import (
    ATTENTION_TOKENS,
    DEFAULT_PAUSE_SECONDS,
    MIN_SECONDS,
    ReturnPredictor,
    SessionPauses,
    block_value,
)


def predictor_of(*seconds: float, max_pauses: int = 512) -> ReturnPredictor:
    """Predictor that has observed these pauses, each of another session."""
    predictor = ReturnPredictor(max_pauses)
    for each in seconds:
        predictor.add(SessionPauses(), each)
    return predictor


def test_pauses_of_a_session_have_an_exponentially_weighted_mean() -> None:
    pauses = SessionPauses()
    for seconds in (4.0, 4.0, 14.0):
        pauses.add(seconds)
    assert pauses.count == 3 and pauses.mean_seconds == pytest.approx(7.0)


def test_return_without_observations_is_expected_after_the_default_pause() -> None:
    remaining = ReturnPredictor().remaining_seconds(SessionPauses(), 4.0)
    assert remaining == DEFAULT_PAUSE_SECONDS - 4.0


def test_new_session_is_expected_after_the_median_of_the_longer_pauses() -> None:
    predictor = predictor_of(1.0, 2.0, 3.0, 60.0, 70.0)
    assert predictor.remaining_seconds(SessionPauses(), 0.0) == 3.0
    assert predictor.remaining_seconds(SessionPauses(), 10.0) == 60.0


def test_pause_that_is_longer_than_all_others_lasts_as_long_again() -> None:
    assert predictor_of(1.0, 2.0).remaining_seconds(SessionPauses(), 30.0) == 30.0


def test_own_pauses_of_a_session_outweigh_those_of_others() -> None:
    predictor, own = predictor_of(*[100.0] * 8), SessionPauses()
    before = predictor.remaining_seconds(own, 0.0)
    for _ in range(8):
        predictor.add(own, 1.0)
    assert before == 100.0
    assert predictor.remaining_seconds(own, 0.0) < 25.0


def test_only_the_recent_pauses_are_remembered() -> None:
    predictor = predictor_of(*[500.0] * 4, *[1.0] * 4, max_pauses=4)
    assert predictor.remaining_seconds(SessionPauses(), 0.0) == 1.0


def test_median_of_longer_pauses_is_that_of_a_plain_computation() -> None:
    random.seed(3)
    seconds = [random.expovariate(0.2) for _ in range(300)]
    predictor = predictor_of(*seconds, max_pauses=200)
    for idle in (0.0, 1.0, 5.0, 12.0):
        longer = [pause for pause in seconds[-200:] if pause > idle]
        expected = statistics.median_high(longer) - idle
        assert predictor.remaining_seconds(SessionPauses(), idle) == pytest.approx(expected)


def test_block_is_worth_more_the_sooner_its_session_returns() -> None:
    assert block_value(1000, 1.0, 1) > block_value(1000, 2.0, 1) > block_value(1000, 50.0, 1)


def test_block_of_a_longer_path_is_worth_more() -> None:
    assert block_value(ATTENTION_TOKENS, 5.0, 1) == 2 * block_value(0, 5.0, 1)


def test_older_paths_of_a_session_are_worth_less() -> None:
    assert block_value(1000, 5.0, 4) == block_value(1000, 5.0, 1) / 4


def test_value_is_bounded_when_a_session_is_expected_now() -> None:
    assert block_value(1000, 0.0, 1) == block_value(1000, MIN_SECONDS, 1)
