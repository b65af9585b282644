"""Lookups: their tokens equal those of the runner's batch, and fruitless ones become rare."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.calibration import DraftCalibration
from engine.speculation.controller import BACKOFF_AFTER, MAX_BACKOFF_STEPS, Controller, Draft
from engine.speculation.cost import StepCostModel
from engine.speculation.counters import Counters
from engine.speculation.cpu_speculator import Speculator
from engine.speculation.request_table import Batch, TrackedRequest
from kernels.draft_index.store_protocol import DraftBatch, Int32Array
from tests.engine.speculation.cost_simulator import Machine
from tests.engine.speculation.fake_runner import Runner
from tests.engine.speculation.test_cost import profile
from tests.kernels.draft_index.reference import ReferenceStore

PROMPT = [1, 2, 3]
Rows = dict[str, list[int]]
rows_of_tokens = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.integers(0, 9), min_size=1, max_size=7), min_size=1
)


class CountingStore(ReferenceStore):
    """Reference store that records the number of new tokens per row, and the tokens."""

    def __init__(self) -> None:
        super().__init__(max_bytes=2**22, max_draft_tokens=4)
        self.steps: list[tuple[list[int], list[int]]] = []

    def step(
        self, slots: Int32Array, counts: Int32Array, tokens: Int32Array, limits: Int32Array
    ) -> DraftBatch:
        self.steps.append((counts.tolist(), tokens.tolist()))
        return super().step(slots, counts, tokens, limits)


def speculator(runner: Runner, controller: Controller) -> tuple[Speculator, CountingStore]:
    store = CountingStore()
    return Speculator(runner, store, controller, Counters(), max_draft_tokens=4), store


@given(steps=st.lists(rows_of_tokens, min_size=1, max_size=4))
def test_lookup_stores_each_new_token_once(steps: list[Rows]) -> None:
    runner = Runner()
    looking, store = speculator(runner, AlwaysLooks())
    for name in "abcdef":
        runner.add(name, PROMPT, group="g")
    for said in steps:
        runner.step(looking, said)
        counts = [len(tokens) for tokens in said.values()]
        tokens = [token for tokens in said.values() for token in tokens]
        assert store.steps[-1] == (counts, tokens)


def test_shortened_row_has_no_new_tokens() -> None:
    rows = [
        TrackedRequest(slot=slot, num_stored=5, num_tokens=99, skip_reason=None) for slot in (0, 1)
    ]
    batch = Batch.of(dict(enumerate(rows)), np.array([3, 7], np.int32))
    assert [array.tolist() for array in batch.store()] == [[5, 5], [0, 2]]
    assert [row.num_stored for row in rows] == [3, 7]


def test_lookups_that_send_nothing_become_rare() -> None:
    machine = Machine(call=0.0, row=0.0, token=1e-3, free_tokens=0)
    runner = Runner()
    cost = StepCostModel(profile(machine))
    looking, store = speculator(runner, Controller(cost, DraftCalibration()))
    names = ["a", "b"]
    for name in names:
        runner.add(name, PROMPT, group="g", max_tokens=1000)
    num_steps = 240
    for number in range(num_steps):
        drafts = runner.step(looking, {name: [10 + number % 100] for name in names})
        assert not any(drafts.values())
    growing = BACKOFF_AFTER + MAX_BACKOFF_STEPS.bit_length()
    warm_up = 64
    assert len(store.steps) <= warm_up + growing + num_steps / MAX_BACKOFF_STEPS


class AlwaysLooks(Controller):
    """Looks drafts up in each step and sends none."""

    def should_draft(self, running: int) -> bool:
        return True

    def lengths(self, drafted: Draft, *, running: int, context: int) -> Int32Array:
        return np.zeros(len(drafted.lengths), np.int32)
