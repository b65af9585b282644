"""Assignment of drafts to rows that are added, moved, preempted and removed."""

from dataclasses import dataclass
from typing import Any

import pytest

from engine.speculation.controller import Draft
from engine.speculation.counters import Counters
from engine.speculation.cpu_speculator import Speculator
from engine.speculation.drafting_base import STORE_UPDATE_INTERVAL
from kernels.draft_index.store_protocol import Int32Array
from tests.engine.speculation.drafting_engine import SendAllDrafts
from tests.engine.speculation.fake_runner import EOS, Runner
from tests.kernels.draft_index.reference import ReferenceStore

PROMPT = [1, 2, 3]
SAID = [10, 11, 12, 13, 14, 15, 16, 17]


class RecordingController(SendAllDrafts):
    """Marks every step as one to be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def lengths(self, drafted: Draft, *, running: int, context: int) -> Int32Array:
        chosen = super().lengths(drafted, running=running, context=context)
        self.decision = "baseline"
        return chosen

    def record_step(self, *, running: int, **step: Any) -> None:
        self.seen.append(running)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def counts() -> Counters:
    return Counters()


@pytest.fixture
def speculator(runner: Runner, counts: Counters) -> Speculator:
    store = ReferenceStore(max_bytes=2**20, max_draft_tokens=4)
    return Speculator(runner, store, SendAllDrafts(), counts, max_draft_tokens=4, clock=Clock())


def test_sample_is_drafted_the_tokens_of_its_sibling(
    runner: Runner, speculator: Speculator
) -> None:
    for name in ("a", "b"):
        runner.add(name, PROMPT, group="g")
    drafts = runner.step(speculator, {"a": SAID, "b": SAID[:2]})
    assert drafts["b"] == SAID[2:6]


def test_rows_may_move_between_steps(runner: Runner, speculator: Speculator) -> None:
    for name, prompt in (("a", PROMPT), ("b", PROMPT), ("other", [7, 8, 9])):
        runner.add(name, prompt, group=str(prompt))
    runner.step(speculator, {"a": SAID, "other": [40, 41, 42, 43, 44], "b": [10]})
    drafts = runner.step(speculator, {"b": [11], "a": [40], "other": [45]})
    assert drafts["b"] == SAID[2:6]


def test_preempted_sample_continues_with_its_history(
    runner: Runner, speculator: Speculator
) -> None:
    for name in ("a", "b"):
        runner.add(name, PROMPT, group="g")
    runner.step(speculator, {"a": SAID, "b": SAID[:1]})
    runner.step(speculator, {"a": [18]})
    runner.step(speculator, {"b": [], "a": [19]}, computed=2)
    drafts = runner.step(speculator, {"a": [20], "b": SAID[1:2]}, computed=5)
    assert drafts["b"] == SAID[2:6]


def test_finished_sample_leaves_its_text_to_later_samples_of_its_prompt(
    runner: Runner, speculator: Speculator
) -> None:
    runner.add("a", PROMPT, group="g")
    runner.step(speculator, {"a": SAID})
    runner.forget("a")
    runner.add("later", PROMPT, group="h")
    assert runner.step(speculator, {"later": SAID[:3]})["later"] == SAID[3:7]


@pytest.mark.parametrize("is_looked_up", [True, False], ids=["looked up", "not looked up"])
@pytest.mark.parametrize("stop", [EOS, 14], ids=["EOS", "stop token"])
def test_text_ends_at_the_stop_token_that_a_step_accepted(
    runner: Runner, speculator: Speculator, stop: int, is_looked_up: bool
) -> None:
    runner.add("a", PROMPT, group="g", stop_token_ids=[14])
    runner.step(speculator, {"a": SAID[:3]})
    accepted = [stop, 70, 14, 71]
    if is_looked_up:
        assert runner.step(speculator, {"a": accepted})["a"] == []
    else:
        runner.say("a", accepted)
    speculator.end(["a"])
    runner.forget("a")
    runner.add("later", PROMPT, group="h")
    assert runner.step(speculator, {"later": SAID[:1]})["later"] == [*SAID[1:3], stop]


def test_incomplete_prefill_gets_no_draft(runner: Runner, speculator: Speculator) -> None:
    for name in ("a", "b"):
        runner.add(name, PROMPT, group="g")
    assert runner.step(speculator, {"a": SAID, "b": []}, computed=2)["b"] == []


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"seed": 3}, "seeded"),
        ({"drafts": False}, "disabled"),
        ({"min_p": 0.1}, "sampling"),
        ({"logit_bias": {3: 1.0}}, "sampling"),
        ({"min_tokens": 5}, "sampling"),
    ],
)
def test_opted_out_sample_gets_no_draft_and_still_provides_its_text(
    runner: Runner, speculator: Speculator, counts: Counters, how: dict[str, Any], reason: str
) -> None:
    runner.add("a", PROMPT, group="g", **how)
    runner.add("b", PROMPT, group="g")
    runner.step(speculator, {"a": SAID, "b": SAID[:1]})
    drafts = runner.step(speculator, {"a": SAID[:2], "b": SAID[1:2]})
    assert (drafts["a"], drafts["b"][:2]) == ([], SAID[2:4])
    assert counts.read()["skipped"] == {reason: 1}


def test_no_token_is_drafted_past_max_tokens(runner: Runner, speculator: Speculator) -> None:
    runner.add("a", PROMPT, group="g")
    runner.add("b", PROMPT, group="g", max_tokens=4)
    drafts = runner.step(speculator, {"a": SAID, "b": SAID[:2]})
    assert drafts["b"] == SAID[2:3]


def test_outcomes_are_counted_by_scope_length_and_version(
    runner: Runner, speculator: Speculator, counts: Counters
) -> None:
    for name in ("a", "b"):
        runner.add(name, PROMPT, group="g")
    runner.step(speculator, {"a": SAID, "b": SAID[:2]})
    sent = runner.step(speculator, {"b": SAID[2:4]}, computed=5)
    counted = counts.read()
    assert (counted["drafted"]["siblings"], counted["accepted"]["siblings"]) == (4, 1)
    assert counted["drafts"] == {4: 1}
    assert (counted["version_drafted"], counted["version_accepted"]) == (4, 1)
    speculator.on_weights_changed()
    assert counts.read()["version_drafted"] == 0
    assert sent["b"] == SAID[4:8]


def test_step_is_timed_only_if_all_rows_decode_and_none_is_new(
    runner: Runner, speculator: Speculator
) -> None:
    speculator.controller = controller = RecordingController()
    for name in ("a", "b"):
        runner.add(name, PROMPT, group="g")
    runner.step(speculator, {"a": [10]}, computed=3)
    runner.step(speculator, {"a": [11]})
    runner.step(speculator, {"a": [12], "b": [10]})
    runner.step(speculator, {"a": [13], "b": [11]})
    runner.step(speculator, {"a": [14], "b": []}, computed=1)
    assert controller.seen == [1, 2]


def test_full_store_costs_a_sample_only_its_drafts(runner: Runner, counts: Counters) -> None:
    store = ReferenceStore(max_bytes=2**22, max_draft_tokens=4)
    speculator = Speculator(
        runner, store, SendAllDrafts(), counts, max_draft_tokens=4, clock=Clock()
    )
    names = [f"n{number}" for number in range(2100)]
    for name in names:
        runner.add(name, PROMPT, group="g")
    drafts = runner.step(speculator, {name: [10] for name in names})
    assert len(drafts) == len(names)
    assert counts.read()["skipped"]["store_full"] > 0


def test_store_records_tokens_while_no_drafts_are_requested(
    runner: Runner, speculator: Speculator
) -> None:
    speculator.controller = silent = NeverDrafts()
    for name in ("a", "b"):
        runner.add(name, PROMPT, group="g")
    for token in range(10, 10 + STORE_UPDATE_INTERVAL):
        assert not any(runner.step(speculator, {"a": [token], "b": []}, computed=1).values())
    silent.wanted = True
    assert runner.step(speculator, {"a": [50], "b": SAID[:2]})["b"] == SAID[2:6]


class NeverDrafts(SendAllDrafts):
    wanted = False

    def should_draft(self, running: int) -> bool:
        return self.wanted
