"""The compiled store against the reference, on random sequences of calls."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.draft_index import compiled_store as compiled
from kernels.draft_index.compiled_store import DraftStore
from kernels.draft_index.store_protocol import ALL_SCOPES, InvalidCall, Scope, Store
from tests.kernels.draft_index.reference import ReferenceStore
from tests.kernels.draft_index.stores import array, assert_alike, draft, run_step

pytestmark = pytest.mark.skipif(
    not compiled.is_built(),
    reason="the library was not built: no C++ compiler when it was installed",
)
PROMPTS = [[1], [1, 2, 1, 2, 1, 2, 1], list(range(40)), [2, 2]]


class Pair:
    """Applies each call to both stores; random draws choose the calls."""

    def __init__(self, draw: Callable[[int], int], *, max_bytes: int, scopes: frozenset[Scope]):
        self.draw = draw
        self.fast: DraftStore = DraftStore(max_bytes=max_bytes, max_draft_tokens=5, scopes=scopes)
        self.slow = ReferenceStore(max_bytes=max_bytes, max_draft_tokens=5, scopes=scopes)
        self.max_bytes = max_bytes
        self.live: list[int] = []

    def act(self) -> None:
        what = self.draw(12)
        if what < 2 or not self.live:
            group, prompt = b"%d" % self.draw(3), array(PROMPTS[self.draw(len(PROMPTS))])
            slot = self.fast.begin(group, prompt)
            assert slot == self.slow.begin(group, prompt)
            self.live.append(slot)
        elif what < 4:
            slot = self.live.pop(self.draw(len(self.live)))
            keep = self.draw(4) > 0
            self.fast.end(slot, keep=keep)
            self.slow.end(slot, keep=keep)
        elif what == 4:
            self.fast.age()
            self.slow.age()
        else:
            self.step()
        self.check()

    def step(self) -> None:
        rows = [slot for slot in self.live if self.draw(4)]
        counts = [self.draw(9) for _ in rows]
        # Repetitive texts, so that there are matches.
        tokens = [(i * i + self.draw(2)) % 3 for i in range(sum(counts))]
        limits = [self.draw(8) for _ in rows]
        call = array(rows), array(counts), array(tokens), array(limits)
        assert_alike(self.fast.step(*call), self.slow.step(*call))

    def check(self) -> None:
        assert self.fast.num_bytes == self.slow.num_bytes
        assert self.fast.num_tokens == self.slow.num_tokens
        assert self.fast.allocated_bytes <= self.fast.num_bytes


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    max_bytes=st.sampled_from([2**14, 2**16, 2**20]),
    scopes=st.sampled_from([ALL_SCOPES, frozenset({Scope.SELF}), ALL_SCOPES - {Scope.SIBLINGS}]),
)
def test_any_sequence_of_calls_has_equal_results(
    seed: int, max_bytes: int, scopes: frozenset[Scope]
) -> None:
    random = np.random.default_rng(seed)
    pair = Pair(lambda below: int(random.integers(below)), max_bytes=max_bytes, scopes=scopes)
    for _ in range(100):
        pair.act()
    for name in ("tried", "accepted", "predicted"):
        np.testing.assert_array_equal(
            getattr(pair.fast.reliability(), name), getattr(pair.slow.reliability(), name)
        )


@pytest.fixture(params=[DraftStore, ReferenceStore])
def store(request: pytest.FixtureRequest) -> Store:
    made: Store = request.param(max_bytes=2**20, max_draft_tokens=5)
    return made


def test_unused_slot_is_refused(store: Store) -> None:
    slot = store.begin(b"g", array([1, 2]))
    store.end(slot, keep=True)
    for wrong in (slot, 7, -1):
        with pytest.raises(InvalidCall, match=f"slot {wrong} is not in use"):
            run_step(store, {wrong: [1]})
        with pytest.raises(InvalidCall, match=f"slot {wrong} is not in use"):
            store.end(wrong, keep=True)


def test_refused_step_has_no_effect(store: Store) -> None:
    slot = store.begin(b"g", array([1, 2]))
    before = store.num_tokens
    with pytest.raises(InvalidCall, match="slot 9 is not in use"):
        run_step(store, {slot: [1, 2, 1], 9: [1]})
    assert store.num_tokens == before
    assert draft(run_step(store, {slot: [7, 8, 7]}))[0] == 8


def test_slot_occurs_once_in_a_step(store: Store) -> None:
    slot = store.begin(b"g", array([1, 2]))
    with pytest.raises(InvalidCall, match="twice"):
        store.step(array([slot, slot]), array([0, 0]), array([]), array([1, 1]))


@pytest.mark.parametrize(
    ("counts", "tokens", "limits", "why"),
    [
        ([1], [-1], [3], "negative token id -1"),
        ([2], [1], [3], "1 tokens, but counts of 2"),
        ([1], [1], [-3], "negative count or limit"),
        ([-1], [], [3], "negative count or limit"),
        ([1, 1], [1, 1], [3], "one per row"),
    ],
)
def test_invalid_arrays_are_refused(
    store: Store, counts: list[int], tokens: list[int], limits: list[int], why: str
) -> None:
    slot = store.begin(b"g", array([1, 2]))
    with pytest.raises(InvalidCall, match=why):
        store.step(array([slot]), array(counts), array(tokens), array(limits))


def test_other_dtypes_and_shapes_are_refused(store: Store) -> None:
    with pytest.raises(InvalidCall, match="int64"):
        store.begin(b"g", np.array([1, 2]))
    with pytest.raises(InvalidCall, match="not 2-D"):
        store.begin(b"g", np.zeros((2, 2), np.int32))
    with pytest.raises(InvalidCall, match="prompt of 0 tokens"):
        store.begin(b"g", array([]))


def test_tokens_may_be_as_large_as_the_dtype(store: Store) -> None:
    largest = 2**31 - 1
    slot = store.begin(b"g", array([largest, 5]))
    assert draft(run_step(store, {slot: [7, largest]}, limit=1)) == [5]
    assert draft(run_step(store, {slot: [5, 7]}, limit=1)) == [largest]


def test_evicted_texts_are_not_drafted_from(store: Store) -> None:
    one, other = store.begin(b"g", array([1, 2])), store.begin(b"g", array([1, 2]))
    run_step(store, {one: [7, 8, 9]})
    store.end(one, keep=False)
    assert not draft(run_step(store, {other: [7]}))


def test_older_versions_weigh_less(store: Store) -> None:
    """Two old texts have one continuation, one recent text has another."""
    for response in ([7, 8, 1], [7, 8, 1]):
        slot = store.begin(b"old", array([1, 2]))
        run_step(store, {slot: response})
        store.end(slot, keep=True)
    asking, now = store.begin(b"g", array([1, 2])), store.begin(b"g", array([1, 2]))
    run_step(store, {now: [7, 9, 1]})
    assert draft(run_step(store, {asking: [7]}, limit=1)) == [8]
    for _ in range(20):
        store.age()
    run_step(store, {now: [3]})
    assert draft(run_step(store, {asking: []}, limit=1)) == [9]


def test_oldest_history_is_evicted_and_running_texts_stay(store: Store) -> None:
    running = store.begin(b"g", array([1, 2]))
    run_step(store, {running: list(range(100, 200))})
    for number in range(200):
        slot = store.begin(b"h", array([5, number]))
        run_step(store, {slot: list(range(300, 350))})
        store.end(slot, keep=True)
    assert store.num_bytes <= 2**20
    assert draft(run_step(store, {running: [100, 101, 102]}, limit=2)) == [103, 104]
    oldest, latest = store.begin(b"i", array([5, 0])), store.begin(b"i", array([5, 199]))
    drafted = run_step(store, {oldest: [], latest: []}, limit=2)
    assert not draft(drafted, 0) and draft(drafted, 1) == [300, 301]


def test_probabilities_are_calibrated_by_outcomes(store: Store) -> None:
    """On a text that repeats itself forever."""
    slot = store.begin(b"g", array([1, 2]))
    run_step(store, {slot: [1, 2] * 20})
    first = run_step(store, {slot: [1, 2]}).probability[0, 0]
    for _ in range(60):
        sure = run_step(store, {slot: [1, 2]}).probability[0, 0]
    assert first < sure > 0.9
    reliability = store.reliability()
    assert reliability.tried.sum() > 200
    assert reliability.error() < 0.2


def test_outcome_counts_even_if_no_part_of_the_draft_was_sent(store: Store) -> None:
    slot = store.begin(b"g", array([1, 2]))
    drafted = run_step(store, {slot: [7, 8, 9, 7]}, limit=3)
    assert draft(drafted) == [8, 9, 7]
    run_step(store, {slot: [8, 9, 5]}, limit=0)
    reliability = store.reliability()
    assert (reliability.tried.sum(), reliability.accepted.sum()) == (3, 2)


def test_store_is_freed_with_its_owner() -> None:
    for _ in range(50):
        stepped_store = DraftStore(max_bytes=2**28)
        run_step(stepped_store, {stepped_store.begin(b"g", array([1])): [1, 2, 3]})
    assert stepped_store.num_tokens == 5


def test_response_log_is_equal_in_both_while_it_wraps_around() -> None:
    """The log has 64 tokens here, and every text belongs to another prompt."""
    random = np.random.default_rng(0)
    fast = DraftStore(max_bytes=2**14, scopes=frozenset({Scope.ALL}))
    slow = ReferenceStore(max_bytes=2**14, scopes=frozenset({Scope.ALL}))
    found = 0
    for number in range(250):
        response = random.integers(0, 2, int(random.integers(1, 25))).tolist()
        for store in (fast, slow):
            slot = store.begin(b"g", array([10 + number]))
        one, other = run_step(fast, {slot: response}), run_step(slow, {slot: response})
        assert_alike(one, other)
        found += int(one.lengths[0])
        for store in (fast, slow):
            store.end(slot, keep=True)
    assert found > 100
