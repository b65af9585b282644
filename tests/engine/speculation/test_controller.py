"""The controller is close to the best draft lengths, and the time lost by drafts is bounded."""

import numpy as np
import pytest

from engine.speculation.calibration import DraftCalibration
from engine.speculation.controller import CHECK_INTERVAL, Controller
from engine.speculation.cost import StepCostModel
from engine.speculation.loss_guard import MAX_LOSS, MIN_REST_STEPS
from tests.engine.speculation.cost_simulator import (
    Drafts,
    Machine,
    Run,
    best_possible_rate,
    calibrated,
)
from tests.engine.speculation.test_cost import profile

DEAR = Machine(call=1e-4, token=1e-3, free_tokens=0)


def controller(machine: Machine) -> Controller:
    return Controller(StepCostModel(profile(machine)), DraftCalibration())


@pytest.mark.parametrize("running", [1, 4, 16, 64])
@pytest.mark.parametrize("probability", [0.2, 0.6, 0.9])
def test_controller_matches_the_best_fixed_length(running: int, probability: float) -> None:
    machine = Machine()
    run = Run(controller(machine), machine, running, predicted=probability, actual=probability)
    run.go(600, np.random.default_rng(2))
    best = best_possible_rate(machine, running=running, probability=probability)
    assert run.rate() > 0.95 * best


def test_each_row_gets_the_length_its_own_draft_is_worth() -> None:
    drafts = Drafts(
        lengths=np.array([8, 8, 0, 2], np.int32),
        probability=np.tile(np.array([[0.95], [0.3], [0.9], [0.95]], np.float32), (1, 8)),
    )
    chosen = calibrated(controller(Machine(free_tokens=0)))
    lengths = chosen.lengths(drafts, running=4, context=400)
    assert lengths[0] > 3 > 2 >= lengths[1]
    assert (lengths[2], lengths[3]) == (0, 2)


def test_draft_stops_before_a_token_not_worth_its_cost() -> None:
    probability = np.array([[0.9, 0.9, 0.05, 0.99, 0.99]], np.float32)
    drafts = Drafts(lengths=np.array([5], np.int32), probability=probability)
    chosen = calibrated(controller(Machine(free_tokens=0)))
    lengths = chosen.lengths(drafts, running=1, context=100)
    assert lengths.tolist() == [2]


def test_nothing_is_drafted_where_verification_costs_its_gain() -> None:
    run = Run(controller(DEAR), DEAR, 16, predicted=0.5, actual=0.5)
    run.go(300, np.random.default_rng(3))
    assert run.off_steps == run.steps
    assert run.controller.decision == "not_worth_it"


def test_lengths_adapt_as_the_batch_drains_and_refills() -> None:
    machine = Machine(call=3e-3, token=3e-4, free_tokens=4)
    shared, chance = controller(machine), np.random.default_rng(4)
    shares = []
    for running in (64, 2, 64, 2):
        run = Run(shared, machine, running, predicted=0.35, actual=0.35).go(200, chance)
        shares.append(run.off_steps / run.steps)
    assert min(shares[0], shares[2]) > 0.9
    assert max(shares[1], shares[3]) < 0.1


def test_at_most_one_step_in_a_hundred_is_skipped_to_measure() -> None:
    machine = Machine()
    run = Run(controller(machine), machine, 4, predicted=0.9, actual=0.9)
    run.go(10 * CHECK_INTERVAL, np.random.default_rng(5))
    assert 0 < run.off_steps <= run.steps / 100


@pytest.mark.parametrize("running", [1, 16, 64])
def test_overconfident_drafts_are_soon_dropped(running: int) -> None:
    """The loss until then is less than 3 % of these steps."""
    machine = Machine(free_tokens=0)
    run = Run(controller(machine), machine, running, predicted=0.9, actual=0.02)
    run.go(4000, np.random.default_rng(6))
    assert run.rate() > 0.97 * run.rate_without_drafts()


def test_nothing_is_verified_before_drafts_have_been_observed() -> None:
    run = Run(controller(Machine()), Machine(), 64, predicted=0.9, actual=0.0)
    run.go(200, np.random.default_rng(9))
    assert run.off_steps == run.steps


def test_drafting_pauses_after_a_loss_of_a_few_steps() -> None:
    machine = Machine()
    shared = controller(machine)
    seconds = 2 * machine.seconds(running=4, context=400, verified=4)
    steps = 0
    while shared.should_draft(4) or shared.decision != "suspended":
        shared.record_step(running=4, context=400, verified=8, seconds=seconds, emitted=4)
        steps += 1
    assert MAX_LOSS <= steps <= 2 * MAX_LOSS
    assert not any(shared.should_draft(4) for _ in range(MIN_REST_STEPS - 1))
    assert shared.should_draft(4)


def test_drafts_resume_after_a_pause_only_for_a_gain_above_the_hysteresis() -> None:
    """The predicted gain lies between none and HYSTERESIS."""
    shared = Controller(StepCostModel(profile(Machine(token=3e-4, free_tokens=0))))
    drafts = Drafts.alike(4, 1, 0.0)
    drafts.probability[:] = smallest_gain(shared, drafts) + 0.01
    assert not shared.lengths(drafts, running=4, context=400).any()
    shared.lengths(Drafts.alike(4, 1, 1.0), running=4, context=400)
    assert shared.lengths(drafts, running=4, context=400).any()
    pause(shared, 4)
    while not shared.should_draft(4):
        pass
    assert not shared.lengths(drafts, running=4, context=400).any()


def smallest_gain(controller: Controller, drafts: Drafts) -> float:
    """Probability of acceptance at which these drafts, all sent, pay for their verification."""
    rows = len(drafts.lengths)
    off, on = controller.cost.seconds(
        running=rows, context=100 * rows, verified=np.array([rows, 2 * rows])
    )
    return float(on / off) - 1


def pause(controller: Controller, running: int) -> None:
    while controller.should_draft(running) or controller.decision != "suspended":
        step = {"running": running, "context": 100 * running, "verified": 2 * running}
        controller.record_step(**step, seconds=1.0, emitted=running)


def test_pause_of_large_batches_does_not_pause_small_ones() -> None:
    shared = controller(Machine())
    pause(shared, 64)
    assert not shared.should_draft(64)
    assert shared.should_draft(4)


def test_drafting_resumes_when_drafts_become_accurate() -> None:
    machine, chance = Machine(), np.random.default_rng(7)
    shared = controller(machine)
    Run(shared, machine, 4, predicted=0.9, actual=0.0).go(200, chance)
    assert shared.decision == "not_worth_it"
    run = Run(shared, machine, 4, predicted=0.9, actual=0.9).go(1500, chance)
    assert run.rate() > 1.5 * run.rate_without_drafts()


def test_reported_gain_equals_the_real_gain() -> None:
    machine = Machine()
    run = Run(controller(machine), machine, 4, predicted=0.8, actual=0.8)
    run.go(1500, np.random.default_rng(8))
    assert run.controller.gain_ratio == pytest.approx(
        run.rate() / run.rate_without_drafts(), rel=0.15
    )
