"""Steps without drafts run without a draft method, and lose no history."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.speculation.controller import Controller, Draft, Int64Array
from engine.speculation.cost import StepCostModel
from engine.speculation.counters import Counters
from engine.speculation.cpu_speculator import Speculator
from engine.speculation.draft_verification import DraftStepSkipper
from kernels.draft_index.store_protocol import Int32Array, InvalidCall
from tests.engine.speculation.cost_simulator import Machine
from tests.engine.speculation.drafting_engine import SendAllDrafts
from tests.engine.speculation.fake_runner import Runner, input_batch
from tests.engine.speculation.test_controller import pause
from tests.engine.speculation.test_cost import profile
from tests.kernels.draft_index.reference import ReferenceStore

PROMPT = [1, 2, 3]
SAID = [10, 11, 12, 13, 14, 15, 16, 17]
CONFIG = "a draft method"


DRAFTS = {"a": [7, 8], "b": []}


@dataclass
class ScriptedDrafter:
    """Draft method that returns the given drafts, and records its calls."""

    drafts: dict[str, list[int]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    calls: list[Sequence[Sequence[int]]] = field(default_factory=list)

    def end(self, ended: Collection[str]) -> None:
        self.ended += sorted(ended)

    def propose(
        self, sampled: Sequence[Sequence[int]], num_tokens: Int32Array, token_ids: Int32Array
    ) -> list[list[int]]:
        assert len(num_tokens) == len(token_ids) == len(sampled)
        self.calls.append(sampled)
        return list(self.drafts.values()) or [[] for _ in sampled]


@dataclass
class Steps:
    """A runner that records its configuration in each step; every row samples token 5."""

    drafter: ScriptedDrafter = field(default_factory=ScriptedDrafter)
    speculative_config: str | None = CONFIG
    taken: list[str | None] = field(default_factory=list)
    input_batch: Any = None
    _draft_token_ids: list[list[int]] | None = None
    _draft_token_req_ids: list[str] | None = None

    def __post_init__(self) -> None:
        DraftStepSkipper(self, self.drafter)

    def execute_model(self, step: Any) -> None:
        self.taken.append(self.speculative_config)
        names = list(step.num_scheduled_tokens)
        self.input_batch = input_batch(names, {name: [1, 5] for name in names})

    def sample_tokens(self, grammar: Any) -> Any:
        self._draft_token_ids = self._draft_token_req_ids = None
        return SimpleNamespace(sampled_token_ids=[[5] for _ in self.input_batch.req_ids])

    def step(self, *rows: str, ended: str = "", drafts: bool = False) -> Any:
        self.execute_model(
            SimpleNamespace(
                num_scheduled_tokens=dict.fromkeys(rows, 1),
                finished_req_ids=set(ended),
                scheduled_spec_decode_tokens={rows[0]: [7]} if drafts else {},
            )
        )
        return self.sample_tokens(None)


def test_step_without_drafts_runs_without_a_draft_method() -> None:
    steps = Steps()
    steps.step("a")
    steps.step("a", drafts=True)
    steps.step("a")
    assert steps.taken == [None, CONFIG, None]


def test_drafts_are_requested_after_a_step_without_drafts() -> None:
    """After a step with drafts, vLLM's own call of the draft method requests them."""
    steps = Steps(ScriptedDrafter(DRAFTS))
    output = steps.step("a", "b")
    assert steps.drafter.calls == [output.sampled_token_ids]
    assert steps._draft_token_ids == list(DRAFTS.values())
    assert steps._draft_token_req_ids == list(DRAFTS)
    steps.step("a", "b", drafts=True)
    assert len(steps.drafter.calls) == 1
    assert steps._draft_token_req_ids is None


def test_scheduler_gets_nothing_if_there_are_no_drafts() -> None:
    steps = Steps()
    steps.step("a")
    assert steps._draft_token_req_ids is None


def test_step_without_tokens_requests_no_drafts() -> None:
    steps = Steps()
    steps.step()
    assert steps.drafter.calls == []


def test_finished_requests_are_reported_before_the_step_drops_them() -> None:
    steps = Steps()
    steps.step("a", "b")
    steps.step("a", ended="b")
    assert steps.drafter.ended == ["b"]


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

    def should_draft(self, running: int) -> bool:
        return self.wanted


def test_tokens_of_skipped_steps_are_drafted_from_afterwards(
    runner: Runner, speculator: Speculator
) -> None:
    for name in ("seen", "unseen", "later"):
        runner.add(name, PROMPT, group="g")
    runner.step(speculator, {"seen": SAID[:2]})
    runner.say("seen", SAID[2:])
    runner.say("unseen", [40, 41, 42, 43])
    speculator.end({"seen", "unseen", "never there"})
    for name in ("seen", "unseen"):
        runner.forget(name)
    speculator.controller = wanting(ScriptedController())
    assert runner.step(speculator, {"later": SAID[:2]})["later"] == SAID[2:6]
    assert runner.step(speculator, {"later": [40, 41]})["later"] == [42, 43]
    assert speculator.num_rows == 1


def test_drafts_that_were_not_sent_are_scored(runner: Runner, speculator: Speculator) -> None:
    speculator.controller = controller = NeverSends()
    for name in ("a", "b"):
        runner.add(name, PROMPT, group="g")
    runner.step(speculator, {"a": SAID, "b": SAID[:2]})
    for token in (SAID[2], 40, SAID[4]):
        runner.step(speculator, {"b": [token]})
    assert controller.right == [1, 0, 1]


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


def wanting(controller: ScriptedController) -> ScriptedController:
    controller.wanted = True
    return controller


def test_opted_out_samples_are_counted_in_skipped_steps(
    runner: Runner, speculator: Speculator
) -> None:
    runner.add("a", PROMPT, drafts=False)
    runner.say("a", SAID)
    speculator.end({"a"})
    assert speculator._counts.read()["skipped"] == {"disabled": 1}
