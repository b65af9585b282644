import logging

import pytest

from engine.runtime.feature_guard import Failure, Feature, attempt, feature, features


class Hook:
    """Fails on negative numbers, and counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def double(self, number: int, *, plus: int = 0) -> int:
        self.num_calls += 1
        if number < 0:
            raise ValueError(f"{number} is negative")
        return 2 * number + plus


def test_working_hook_is_left_alone() -> None:
    hook, shoots = Hook(), Feature("shoots")
    double = shoots.guarded_with_default(-1)(hook.double)
    assert double(3, plus=1) == 7
    assert shoots.state.on and shoots.state.num_failures == 0 and shoots.state.reason is None


def test_first_failure_disables_every_hook_of_the_feature() -> None:
    hook, shoots = Hook(), Feature("shoots")
    first, second = (
        shoots.guarded_with_default(-1)(hook.double),
        shoots.guarded_with_default(-2)(hook.double),
    )
    assert first(-5) == -1
    assert (first(3), second(3)) == (-1, -2)
    assert hook.num_calls == 1
    assert not shoots.state.on and shoots.state.num_failures == 1
    assert shoots.state.reason == "ValueError: -5 is negative"


def test_fallback_is_called_with_the_arguments_of_the_hook() -> None:
    hook, shoots = Hook(), Feature("shoots")

    def by_hand(number: int, *, plus: int = 0) -> int:
        return 100 * number + plus

    double = shoots.guarded(by_hand)(hook.double)
    assert double(-5, plus=2) == -498
    assert double(3, plus=2) == 302


def test_exception_of_the_fallback_propagates() -> None:
    hook, shoots = Hook(), Feature("shoots")

    def broken(number: int, *, plus: int = 0) -> int:
        raise LookupError("no way")

    double = shoots.guarded(broken)(hook.double)
    with pytest.raises(LookupError, match="no way"):
        double(-5)


def test_only_the_first_failure_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook, shoots = Hook(), Feature("shoots")
    with caplog.at_level(logging.ERROR):
        shoots.guarded_with_default(-1)(hook.double)(-5)
        shoots.disable(ValueError("again"))
    (record,) = caplog.records
    assert "shoots is off in this process: ValueError: -5 is negative" in record.getMessage()
    assert record.exc_info is not None and record.exc_info[2] is not None
    assert shoots.state.num_failures == 2


def test_keyboard_interrupt_passes_through() -> None:
    shoots = Feature("shoots")

    @shoots.guarded_with_default(None)
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert shoots.state.on


def test_features_are_known_by_name() -> None:
    assert feature("roots of this test") is feature("roots of this test")
    feature("roots of this test").disable(ValueError("dry"))
    assert features()["roots of this test"].reason == "ValueError: dry"


def test_attempt_returns_its_result_or_its_failure() -> None:
    hook = Hook()
    assert attempt(hook.double, 4, plus=1) == 9
    assert attempt(hook.double, -4) == Failure("ValueError: -4 is negative")
    assert attempt(hook.double, 4) == 8
