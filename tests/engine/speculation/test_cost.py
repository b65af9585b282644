"""The cost model learns step times from few steps, including outliers."""

import numpy as np
import pytest

from engine.speculation.cost import MIN_SPEEDUP, Step, StepCostModel, best_speedup
from tests.engine.speculation.cost_simulator import Machine

MACHINE = Machine()


def step(machine: Machine, running: int, each: int, context: int) -> Step:
    sizes = {"running": running, "context": context * running, "verified": running * each}
    return Step(**sizes, seconds=machine.seconds(**sizes))


def profile(machine: Machine) -> list[Step]:
    return [
        step(machine, running, each, 64)
        for running in (1, 4, 16, 64)
        for each in (1, 2, 3, 5, 9)
        if running * each <= 320
    ]


def error(cost: StepCostModel, wanted: Step) -> float:
    verified = np.array([wanted.verified])
    seconds = cost.seconds(running=wanted.running, context=wanted.context, verified=verified)
    return float(abs(seconds[0] / wanted.seconds - 1))


def test_profile_predicts_steps_between_its_own() -> None:
    cost = StepCostModel(profile(MACHINE))
    for running, each in ((2, 3), (8, 1), (8, 4), (32, 2), (48, 3)):
        assert error(cost, step(MACHINE, running, each, 64)) < 0.15


def test_more_tokens_never_cost_less() -> None:
    chance = np.random.default_rng(0)
    noisy = Machine(noise=0.5)
    cost = StepCostModel()
    for _ in range(300):
        running, each = int(chance.integers(1, 65)), int(chance.integers(1, 9))
        sizes = {"running": running, "context": 64 * running, "verified": running * each}
        cost.record_step(Step(**sizes, seconds=noisy.measured(chance, **sizes)))
    seconds = cost.seconds(running=16, context=1000, verified=np.arange(16, 300))
    assert (np.diff(seconds) >= 0).all()


def test_changed_step_costs_are_learned_while_serving() -> None:
    """The machine became half as fast, and a third as fast per token."""
    cost = StepCostModel(profile(MACHINE))
    slower = Machine(call=2e-3, row=4e-5, token=3e-4)
    chance = np.random.default_rng(1)
    for number in range(600):
        sizes = {"running": 16, "context": 16 * (64 + number), "verified": 16 * (1 + number % 6)}
        cost.record_step(Step(**sizes, seconds=slower.measured(chance, **sizes)))
    for each in (1, 2, 4, 6):
        assert error(cost, step(slower, 16, each, 400)) < 0.15
    assert cost.error < 0.15


def test_pause_within_a_step_does_not_count_as_its_cost() -> None:
    cost = StepCostModel(profile(MACHINE))
    for number in range(200):
        usual = step(MACHINE, 16, 1 + number % 4, 64)
        held_up = Step(running=16, context=usual.context, verified=usual.verified, seconds=30.0)
        cost.record_step(held_up if number % 50 == 49 else usual)
    assert error(cost, step(MACHINE, 16, 3, 64)) < 0.15


def test_without_a_profile_drafts_have_an_assumed_cost() -> None:
    cost = StepCostModel()
    for _ in range(20):
        cost.record_step(step(MACHINE, 16, 1, 64))
    seconds = cost.seconds(running=16, context=1024, verified=np.array([16, 32, 80]))
    assert seconds[0] == pytest.approx(step(MACHINE, 16, 1, 64).seconds, rel=0.1)
    assert seconds[0] * 1.1 < seconds[1] < seconds[2]


def test_speculation_can_pay_unless_each_token_costs_a_step() -> None:
    assert best_speedup(profile(MACHINE), 8) > MIN_SPEEDUP
    hopeless = Machine(call=1e-6, row=0.0, token=1e-3, free_tokens=0)
    assert best_speedup(profile(hopeless), 8) < MIN_SPEEDUP


@pytest.mark.parametrize("seed", [40, 41, 69])
def test_predicted_step_time_is_never_zero(seed: int) -> None:
    """If every step had drafts and some were delayed, the whole cost may look like theirs."""
    cost, chance = StepCostModel(), np.random.default_rng(seed)
    for number in range(300):
        running = 64 if chance.random() < 0.9 else int(chance.integers(1, 64))
        context, verified = 64 * (10 + 2 * number), running + int(chance.integers(100, 256))
        held_up = 10 if chance.random() < 0.02 else 1
        seconds = held_up * (1e-3 + 2e-5 * verified * (1 + number / 100))
        seconds *= np.exp(0.6 * chance.normal())
        cost.record_step(Step(running=running, context=context, verified=verified, seconds=seconds))
        assert cost.seconds_without_drafts(running=64, context=context) > 0
