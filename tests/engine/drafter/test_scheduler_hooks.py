"""Draft lengths, step by step, and their counters."""

from collections.abc import Iterator

import pytest

from engine.drafter.core import scheduler_hooks as module
from engine.drafter.core.draft_length import HOLD_STEPS, INITIAL_PROBES
from engine.runtime.feature_guard import FeatureState
from engine.speculation.cost import Profile
from engine.speculation.request_table import NO_DRAFTS_ARG
from tests.engine.drafter.fake_scheduler import LONGEST, ROWS, Scheduler, Versions, drafting_over


@pytest.fixture(autouse=True)
def working() -> Iterator[None]:
    """Re-enables the feature after each test. A failure otherwise disables it process-wide."""
    yield
    module.FEATURE.state = FeatureState(on=True, num_failures=0, reason=None)


def with_rows(scheduler: Scheduler) -> Scheduler:
    for row in range(ROWS):
        scheduler.add(f"r{row}")
    return scheduler


def steps(scheduler: Scheduler, number: int) -> list[int]:
    """Draft lengths of the steps."""
    for _ in range(number):
        scheduler.step()
    return scheduler.lengths[-number:]


class Recorded(Profile):
    """A profile that keeps each step's tokens per row and time."""

    def __init__(self, max_draft_tokens: int) -> None:
        super().__init__(max_draft_tokens)
        self.times: list[tuple[int, float]] = []

    def record_step(self, *, running: int, context: int, verified: int, seconds: float) -> None:
        self.times.append((verified // running, seconds))


def test_accurate_drafter_drafts_the_maximum() -> None:
    scheduler = with_rows(Scheduler())
    drafting_over(scheduler)
    steps(scheduler, 400)
    assert steps(scheduler, 100).count(LONGEST) > 90


def test_inaccurate_drafter_is_skipped_and_probed_periodically() -> None:
    scheduler = with_rows(Scheduler(accepted=lambda drafted: 0))
    drafting_over(scheduler)
    steps(scheduler, 600)
    lengths = steps(scheduler, 2048)
    assert lengths.count(0) > 0.97 * len(lengths)
    assert set(lengths) == {0, 1}


def test_drafting_stops_where_verification_costs_its_gain() -> None:
    """The profile was wrong: here two tokens take twice the time of one."""
    scheduler = with_rows(
        Scheduler(accepted=lambda drafted: 1, seconds=lambda drafted: 0.01 * (1 + 2.0 * drafted))
    )
    drafting_over(scheduler)
    steps(scheduler, 2000)
    lengths = steps(scheduler, 1000)
    assert lengths.count(0) > 0.9 * len(lengths)


def test_length_is_held_so_that_steps_can_be_timed() -> None:
    scheduler = with_rows(Scheduler())
    drafting = drafting_over(scheduler)
    lengths = steps(scheduler, 400)
    changes = [place for place in range(1, 400) if lengths[place] != lengths[place - 1]]
    assert all(
        later - earlier >= HOLD_STEPS for earlier, later in zip(changes, changes[1:], strict=False)
    )
    assert drafting.length.controller.gain_ratio > 1.5


@pytest.mark.parametrize("is_async", [False, True])
def test_every_time_is_attributed_to_the_step_that_took_it(is_async: bool) -> None:
    scheduler = Scheduler(is_async=is_async, seconds=lambda drafted: 0.01 * (1 + drafted))
    drafting = drafting_over(with_rows(scheduler))
    profile = Recorded(LONGEST)
    drafting.length.profile = profile
    steps(scheduler, 200)
    assert len({verified for verified, _ in profile.times}) > 2
    assert all(seconds == pytest.approx(0.01 * verified) for verified, seconds in profile.times)


def test_acceptance_is_estimated_per_drafter_and_weights_version() -> None:
    scheduler, versions = with_rows(Scheduler(accepted=lambda drafted: 1)), Versions()
    drafting = drafting_over(scheduler, versions)
    steps(scheduler, 40)
    versions.weights = "v1"
    steps(scheduler, 40)
    drafting.set_drafter("d1", on_trial=True)
    steps(scheduler, 40)
    counted = drafting.read()
    assert [(p["drafter"], p["weights"]) for p in counted["pairs"]] == [
        ("d0", "v0"),
        ("d0", "v1"),
        ("d1", "v1"),
    ]
    for pair in counted["pairs"]:
        assert pair["first_accepted"] == pair["first_drafted"] > 0
        assert pair["accepted"] == pair["first_drafted"]
        assert pair["drafted"] >= pair["accepted"]
    assert counted["serving"] == "d1"
    drafted = {(p["drafter"], p["weights"]): p["first_drafted"] for p in counted["pairs"]}
    # The last draft of d0 is verified when d1 already serves.
    assert drafted["d0", "v1"] + drafted["d1", "v1"] == 80 * ROWS
    assert drafted["d1", "v1"] == 39 * ROWS
    assert drafting.speculation()["drafted"]["drafter"] == sum(
        pair["drafted"] for pair in counted["pairs"]
    )


def test_drafter_in_an_ab_test_drafts_in_every_step() -> None:
    scheduler = with_rows(Scheduler(accepted=lambda drafted: 0))
    drafting = drafting_over(scheduler)
    steps(scheduler, 2 * HOLD_STEPS * INITIAL_PROBES)
    assert 0 in steps(scheduler, 20)
    drafting.set_drafter("d1", on_trial=True)
    steps(scheduler, HOLD_STEPS)
    assert set(steps(scheduler, 200)) == {1}
    drafting.set_drafter("d0", on_trial=False)
    steps(scheduler, 2 * HOLD_STEPS * INITIAL_PROBES)
    assert 0 in steps(scheduler, 20)


def test_seeded_opted_out_and_finishing_samples_get_no_drafts() -> None:
    scheduler = Scheduler()
    scheduler.add("seeded", seed=3)
    scheduler.add("refused", **{NO_DRAFTS_ARG: True})
    scheduler.add("plain")
    scheduler.add("ending")
    scheduler.requests["ending"].max_tokens = 3
    drafting = drafting_over(scheduler)
    drafted: dict[str, int] = {}
    for _ in range(100):
        scheduler.step()
        for name, request in scheduler.requests.items():
            drafted[name] = max(drafted.get(name, 0), len(request.spec_token_ids))
    assert (drafted["seeded"], drafted["refused"]) == (0, 0)
    assert drafted["plain"] > 1
    assert drafted["ending"] <= 1
    assert drafting.speculation()["skipped"] == {"seeded": 1, "disabled": 1}


def test_profiling_runs_and_times_every_length() -> None:
    scheduler = with_rows(Scheduler(accepted=lambda drafted: 0))
    drafting = drafting_over(scheduler)
    drafting.length.begin_profile()
    assert set(steps(scheduler, 200)) == {0, 1, 2, LONGEST}
    assert drafting.length.profile is not None
    measured = {step.verified: step.seconds for step in drafting.length.profile.steps()}
    assert set(measured) == {ROWS * (1 + length) for length in (0, 1, 2, LONGEST)}
    for verified, seconds in measured.items():
        assert seconds == pytest.approx(scheduler.seconds(verified // ROWS - 1))
    assert not drafting.read()["pairs"]


def test_failure_disables_drafts_and_affects_nothing_else() -> None:
    scheduler = with_rows(Scheduler())
    drafting = drafting_over(scheduler)
    steps(scheduler, 100)
    del drafting.length.controller
    steps(scheduler, HOLD_STEPS + 1)
    assert set(steps(scheduler, 50)) == {0}
    assert not module.FEATURE.state.on


def test_steps_with_prefill_or_waits_are_not_timed() -> None:
    scheduler = with_rows(Scheduler())
    drafting = drafting_over(scheduler)
    steps(scheduler, 200)
    gained = drafting.length.controller.gain_ratio
    scheduler.now += 3600
    scheduler.running.clear()
    drafting.before_schedule()
    assert drafting.length.controller.gain_ratio == gained


def test_with_planned_graphs_only_their_lengths_are_drafted() -> None:
    for max_samples, max_draft_tokens in (
        ({0: 64, 2: ROWS, LONGEST: ROWS - 1}, 2),
        ({0: 64, 3: ROWS}, 3),
        ({0: 64, 2: ROWS - 1}, 0),
    ):
        scheduler = with_rows(Scheduler())
        drafting_over(scheduler, max_samples=max_samples)
        steps(scheduler, 400)
        assert set(steps(scheduler, 100)) <= {0, max_draft_tokens}
        assert scheduler.lengths[-100:].count(max_draft_tokens) > 90


def test_with_planned_graphs_a_probe_uses_the_shortest_length() -> None:
    scheduler = with_rows(Scheduler(accepted=lambda drafted: 0))
    drafting_over(scheduler, max_samples={0: 64, 2: ROWS, LONGEST: ROWS})
    steps(scheduler, 600)
    assert set(steps(scheduler, 2048)) == {0, 2}
