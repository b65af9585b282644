"""The replay of recorded rollouts loses no token and uses no future token."""

from pathlib import Path

import pytest

from bench.drafter_replay import LENGTHS, replay_all, replay_with_finished
from bench.replay.costs import LinearCost, MeasuredCost
from bench.replay.drafters import NgramDrafter, StoreDrafter
from bench.replay.replay import Controller, Fixed, Replay, ThresholdPolicy, common_prefix_length
from bench.replay.traces import TRACES, Group, Trace
from bench.straggler_drafts import NO_DRAFTS, ORACLE, OURS, replay_waves, rows_of
from engine.speculation.calibration import DraftCalibration
from engine.speculation.controller import Controller as Ruling
from engine.speculation.cost import Step, StepCostModel
from kernels.draft_index.compiled_store import is_built

pytestmark = pytest.mark.skipif(
    not is_built(),
    reason="the library was not built: no C++ compiler when it was installed",
)
TEXT = tuple(range(5, 45))


def trace() -> Trace:
    """A part of the recording at temperature 1."""
    replay_all = Trace.load(TRACES / "seedling-1.0.npz")
    return Trace(
        model=replay_all.model,
        temperature=replay_all.temperature,
        entropies=replay_all.entropies[:2],
        epochs=tuple(groups[:3] for groups in replay_all.epochs[:2]),
    )


def replayed(controller: Controller, *, is_oracle: bool = False, running: int = 64) -> Replay:
    replayer = Replay(
        drafter=StoreDrafter(),
        controller=controller,
        is_oracle=is_oracle,
        max_running=running,
        costs=LinearCost(fixed=1.0, token=0.02),
    )
    for number, groups in enumerate(trace().epochs):
        replayer.epoch(number, groups)
    return replayer


def test_trace_round_trips(tmp_path: Path) -> None:
    trace().save(tmp_path / "trace.npz")
    assert Trace.load(tmp_path / "trace.npz") == trace()


@pytest.mark.parametrize(
    "controller", [Fixed(0), Fixed(3), Fixed(16), ThresholdPolicy(0.5)], ids=str
)
@pytest.mark.parametrize("running", [5, 64])
def test_every_token_is_generated_once_whatever_was_drafted(
    controller: Controller, running: int
) -> None:
    result = replayed(controller, running=running).result
    assert result.emitted == trace().num_tokens - trace().num_responses
    assert result.passes <= result.emitted


def test_without_drafts_every_pass_gives_one_token() -> None:
    assert replayed(Fixed(0)).result.accepted_length == 1


def test_no_fixed_length_is_faster_than_the_oracle() -> None:
    """With the same drafts; the progress of siblings differs slightly."""
    oracle = replayed(Fixed(16), is_oracle=True).result.seconds
    assert all(replayed(Fixed(length)).result.seconds > oracle for length in LENGTHS)


def test_identical_simultaneous_siblings_do_not_help() -> None:
    replayer = Replay(drafter=StoreDrafter(), controller=Fixed(16))
    replayer.epoch(0, [Group(prompt=(1, 2), responses=(TEXT,) * 4)])
    assert replayer.result.accepted_length == 1


def test_later_waves_follow_earlier_ones() -> None:
    replayer = Replay(drafter=StoreDrafter(), controller=Fixed(16), max_running=1)
    replayer.epoch(0, [Group(prompt=(1, 2), responses=(TEXT,) * 4)])
    assert replayer.result.accepted_length > 3


def test_finished_siblings_lengthen_accepted_drafts() -> None:
    lengths = [
        replay_with_finished(trace(), StoreDrafter, number).accepted_length for number in (0, 3, 15)
    ]
    assert lengths[0] * 1.2 < lengths[1] and lengths[1] * 1.2 < lengths[2]


def test_n_grams_are_followed_from_their_first_occurrence() -> None:
    drafter = NgramDrafter()
    text = [1, 2, 3, 4, 9, 2, 3, 4, 8, 1, 2, 3, 4]
    assert drafter.draft(text, 3) == [9, 2, 3]
    assert drafter.draft([1, 2, 3], 3) == []


def test_matching_ends_with_the_shorter_text() -> None:
    assert common_prefix_length([1, 2, 3], (1, 2)) == 2
    assert common_prefix_length([1, 5], (1, 2, 3)) == 1
    assert common_prefix_length([], (1,)) == 0


def test_controller_of_the_engine_runs_in_a_replay() -> None:
    """If drafts are almost free, it performs nearly as well as the longest drafts."""
    steps = [
        Step(running=rows, context=100 * rows, verified=rows * more, seconds=1 + rows * more / 500)
        for rows in (1, 4, 16, 64)
        for more in (1, 2, 4, 8)
    ]
    costs = MeasuredCost(StepCostModel(steps))
    found = {
        name: replay_all(trace(), StoreDrafter(), controller, costs).seconds
        for name, controller in (
            ("none", Fixed(0)),
            ("max_draft_tokens", Fixed(16)),
            ("ruled", Ruling(StepCostModel(steps), DraftCalibration())),
        )
    }
    assert found["ruled"] < 0.9 * found["none"]
    assert found["ruled"] < 1.3 * found["max_draft_tokens"]


def test_tail_without_drafts_is_as_fast_as_itself() -> None:
    tail = replayed(Fixed(0), running=4).result.tail
    assert tail.seconds > 0
    assert tail.speedup == pytest.approx(1)


def test_speedup_of_a_single_request_is_its_accepted_length_if_drafts_are_free() -> None:
    replayer = Replay(drafter=StoreDrafter(), controller=Fixed(8), max_running=1)
    replayer.epoch(0, trace().epochs[0])
    assert replayer.result.accepted_length > 1.1
    assert replayer.result.tail.speedup == pytest.approx(replayer.result.accepted_length)


STEPS = [
    Step(running=running, context=50 * running, verified=verified, seconds=1 + 0.02 * verified)
    for running in (1, 4, 16, 32)
    for verified in (running, 2 * running, 4 * running)
]


def test_earlier_epochs_are_known_only_with_history() -> None:
    known, forgotten = (
        replay_waves(trace(), ORACLE, STEPS, has_history=has_history)
        for has_history in (True, False)
    )
    assert known.emitted == forgotten.emitted
    assert known.accepted_length > 1.2 * forgotten.accepted_length


def test_gains_are_rated_by_that_of_the_oracle() -> None:
    rows = {row.what: row for row in rows_of(trace(), "CPU", STEPS, has_history=True)}
    plain, ours, oracle = (
        replay_waves(trace(), name, STEPS, has_history=True).seconds
        for name in (NO_DRAFTS, OURS, ORACLE)
    )
    row = rows[f"CPU, T 1.0, known prompts, {OURS}: all steps"]
    assert row.value == f"{plain / ours:.2f} times as fast as no drafts"
    assert row.goal == f">= {1 + (plain / oracle - 1) / 2:.2f}, half of the oracle's gain"
