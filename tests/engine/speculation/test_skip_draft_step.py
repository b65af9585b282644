"""Steps without drafts run without a draft method, and lose no history."""

from collections.abc import Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.runtime.feature_guard import Feature
from engine.speculation.controller import Controller, Draft, Int64Array
from engine.speculation.cost import StepCostModel
from engine.speculation.counters import Counters
from engine.speculation.draft_verification import DraftStepSkipper
from engine.speculation.drafting import STORE_UPDATE_INTERVAL
from engine.speculation.speculator import Speculator
from kernels.draft_index.store_protocol import Int32Array, InvalidCall
from tests.engine.speculation.cost_simulator import Machine
from tests.engine.speculation.drafting_engine import SendAllDrafts
from tests.engine.speculation.fake_runner import Runner
from tests.engine.speculation.test_controller import pause
from tests.engine.speculation.test_cost import profile
from tests.kernels.draft_index.reference import ReferenceStore

PROMPT = [1, 2, 3]
SAID = [10, 11, 12, 13, 14, 15, 16, 17]
CONFIG = "a draft method"


@dataclass
class StepObserver:
    awake: bool = False
    ended: list[str] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)
    seconds: list[tuple[int, float]] = field(default_factory=list)

    def end(self, ended: set[str]) -> None:
        self.ended += sorted(ended)

    def needs_draft_step(self, scheduled: Collection[str]) -> bool:
        self.looks.append(len(scheduled))
        return self.awake

    def on_skipped_step(self, running: int, seconds: float) -> None:
        self.seconds.append((running, seconds))


@dataclass
class Steps:
    """A runner that records its configuration in each step, one step per second."""

    observer: StepObserver | None
    speculative_config: str | None = CONFIG
    taken: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.feature = Feature("of a test")
        DraftStepSkipper(self, lambda: self.observer, self.feature, lambda: float(len(self.taken)))

    def execute_model(self, step: Any) -> None:
        self.taken.append(self.speculative_config)

    def step(self, *rows: str, tokens: int = 0, ended: str = "", drafts: bool = False) -> None:
        self.execute_model(
            SimpleNamespace(
                num_scheduled_tokens=dict.fromkeys(rows, 1),
                total_num_scheduled_tokens=tokens or len(rows),
                finished_req_ids=set(ended),
                scheduled_spec_decode_tokens={rows[0]: [7]} if drafts else {},
            )
        )


def test_step_without_drafts_runs_without_a_draft_method() -> None:
    steps = Steps(StepObserver())
    steps.step("a")
    steps.step("a", drafts=True)
    assert steps.observer is not None
    steps.observer.awake = True
    steps.step("a")
    assert steps.taken == [None, CONFIG, CONFIG]


def test_empty_step_is_ignored() -> None:
    steps = Steps(observer := StepObserver())
    steps.step("a")
    steps.step(ended="a")
    steps.step("b")
    assert (observer.looks, observer.ended) == ([1, 1], ["a"])


def test_if_nothing_will_be_drafted_every_step_is_skipped() -> None:
    steps = Steps(None)
    steps.step("a")
    assert steps.taken == [None]


def test_step_is_timed_if_all_rows_decode_and_the_next_has_the_same() -> None:
    steps = Steps(observer := StepObserver())
    steps.step("a", "b", tokens=9)
    steps.step("a", "b")
    steps.step("a", "b")
    steps.step("a", ended="b")
    steps.step("a")
    steps.step("a", drafts=True)
    steps.step("a")
    assert observer.seconds == [(2, 1.0), (1, 1.0)]
    assert observer.ended == ["b"]


def test_failure_of_the_skip_logic_keeps_pending_drafts() -> None:
    steps = Steps(observer := StepObserver())
    del observer.ended
    steps.step("a", drafts=True)
    steps.step("a")
    assert steps.taken == [CONFIG, None]
    assert not steps.feature.state.on


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def speculator(runner: Runner) -> Speculator:
    store = ReferenceStore(max_bytes=2**20, max_draft_tokens=4)
    return Speculator(runner, store, ScriptedController(), Counters(), max_draft_tokens=4)


class ScriptedController(SendAllDrafts):
    """Requests drafts when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = False
        self.seen: list[tuple[int, int, float]] = []

    def should_draft(self, running: int) -> bool:
        return self.wanted

    def record_step(self, *, running: int, context: int, seconds: float, **_: int) -> None:
        self.seen.append((running, context, seconds))


def test_tokens_of_skipped_steps_are_drafted_from_afterwards(
    runner: Runner, speculator: Speculator
) -> None:
    for name in ("seen", "unseen", "later"):
        runner.add(name, PROMPT, group="g")
    runner.step(speculator, {"seen": SAID[:2]})
    assert not speculator.needs_draft_step({"seen", "unseen"})
    runner.say("seen", SAID[2:])
    runner.say("unseen", [40, 41, 42, 43])
    speculator.end({"seen", "unseen", "never there"})
    for name in ("seen", "unseen"):
        runner.forget(name)
    speculator.controller = wanting(ScriptedController())
    assert runner.step(speculator, {"later": SAID[:2]})["later"] == SAID[2:6]
    assert runner.step(speculator, {"later": [40, 41]})["later"] == [42, 43]
    assert speculator.num_rows == 1


def test_step_that_verifies_drafts_is_a_draft_step(runner: Runner, speculator: Speculator) -> None:
    speculator.controller = controller = wanting(ScriptedController())
    for name in ("a", "b"):
        runner.add(name, PROMPT, group="g")
    runner.step(speculator, {"a": SAID, "b": SAID[:2]})
    controller.wanted = False
    assert speculator.needs_draft_step({"a", "b"})
    runner.step(speculator, {"a": [18], "b": [12]})
    assert not speculator.needs_draft_step({"a", "b"})


def test_unsent_drafts_are_scored_without_a_draft_step(
    runner: Runner, speculator: Speculator
) -> None:
    speculator.controller = controller = NeverSends()
    for name in ("a", "b"):
        runner.add(name, PROMPT, group="g")
    runner.step(speculator, {"a": SAID, "b": SAID[:2]})
    for told in (SAID[2], 40, SAID[4]):
        assert not speculator.needs_draft_step({"a", "b"})
        runner.say("b", [told])
    assert not speculator.needs_draft_step({"a", "b"})
    assert controller.right == [1, 0, 1]


def test_lookup_before_a_step_requests_the_draft_step(
    runner: Runner, speculator: Speculator
) -> None:
    speculator.controller = controller = wanting(ScriptedController())
    for name in ("a", "b", "c"):
        runner.add(name, PROMPT, group=name[:1] if name == "c" else "g")
    controller.wanted = False
    runner.step(speculator, {"a": SAID, "b": SAID[:2]})
    controller.wanted = True
    assert speculator.needs_draft_step({"a", "b", "c"})
    assert runner.step(speculator, {"a": [18], "b": [12], "c": []})["b"] == SAID[3:7]


def test_pause_of_batches_of_another_size_does_not_end_drafts(runner: Runner) -> None:
    """The rows with drafts alone are a batch of a smaller size than the step."""
    store = RefusingStore(max_bytes=2**20, max_draft_tokens=4)
    controller = Controller(StepCostModel(profile(Machine())))
    looking = Speculator(runner, store, controller, Counters(), max_draft_tokens=4)
    for name in ("a", "full1", "full2", "full3"):
        runner.add(name, PROMPT, group=name)
    said = {"a": SAID[:4] * 2, "full1": [5], "full2": [5], "full3": [5]}
    pause(controller, 1)
    assert runner.step(looking, said)["a"]


class RefusingStore(ReferenceStore):
    """Store that has no slot for requests whose name begins with `full`."""

    def begin(self, group: bytes, prompt: Int32Array) -> int:
        if group.startswith(b"full"):
            raise InvalidCall("full")
        return super().begin(group, prompt)


def test_finished_request_is_not_looked_up_again(runner: Runner, speculator: Speculator) -> None:
    speculator.controller = wanting(ScriptedController())
    for name in ("a", "b"):
        runner.add(name, PROMPT, group="g")
    runner.step(speculator, {"a": SAID, "b": [40]})
    runner.step(speculator, {"a": [18], "b": [41]})
    speculator.end({"a"})
    speculator.needs_draft_step({"b"})
    runner.forget("a")
    runner.step(speculator, {"b": [42]})
    assert speculator.num_rows == 1


class NeverSends(SendAllDrafts):
    """Looks drafts up in each step and sends none; records those of the last row that are right."""

    def __init__(self) -> None:
        super().__init__()
        self.right: list[int] = []

    def lengths(self, drafted: Draft, *, running: int, context: int) -> Int32Array:
        return np.zeros(len(drafted.lengths), np.int32)

    def record_acceptance(self, drafted: Draft, sent: Int64Array, right: Int64Array) -> None:
        self.right.append(int(right[-1]))


def test_tokens_are_stored_before_too_many_accumulate(
    runner: Runner, speculator: Speculator
) -> None:
    speculator.controller = ScriptedController()
    runner.add("a", PROMPT)
    runner.step(speculator, {"a": [40]})
    stored = speculator.store.num_tokens
    for _ in range(STORE_UPDATE_INTERVAL - 1):
        assert speculator.store.num_tokens == stored
        assert not speculator.needs_draft_step({"a"})
        runner.say("a", [40])
    assert speculator.store.num_tokens > stored


def test_skipped_step_is_counted_with_its_own_context(
    runner: Runner, speculator: Speculator
) -> None:
    speculator.controller = controller = wanting(ScriptedController())
    runner.add("a", PROMPT)
    speculator.on_skipped_step(1, 0.5)
    runner.step(speculator, {"a": [10]})
    speculator.on_skipped_step(2, 0.5)
    runner.step(speculator, {"a": [11]})
    assert controller.seen[0] == (1, 3, 0.5)
    assert (2, 0.5) not in [(running, seconds) for running, _, seconds in controller.seen]


def wanting(controller: ScriptedController) -> ScriptedController:
    controller.wanted = True
    return controller


def test_opted_out_samples_are_counted_in_skipped_steps(
    runner: Runner, speculator: Speculator
) -> None:
    runner.add("a", PROMPT, drafts=False)
    assert not speculator.needs_draft_step({"a"})
    runner.say("a", SAID)
    speculator.end({"a"})
    assert speculator._counts.read()["skipped"] == {"disabled": 1}
