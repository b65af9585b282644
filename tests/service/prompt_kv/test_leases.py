"""The leases of handles against a model of every lease's deadline, on a clock set by the test."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from service.config.prompt_kv import KvSettings
from service.errors import KvGone
from service.kv.handles.handle import Handle
from service.kv.handles.index import HandleIndex
from tests.sample_sizes import num_examples
from tests.service.prompt_kv.test_handles import REPLICA, committed, opened_store

MAX_LEASE_SECONDS, MAX_LEASES = 50.0, 3
MAX_LIFETIME_SECONDS = MAX_LEASES * MAX_LEASE_SECONDS
SECONDS = st.integers(1, 100).map(float)


class LeaseMachine(RuleBasedStateMachine):
    """The model has, per lease, none, or its deadline and its latest possible deadline."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        clock = self.clock
        self.directory = TemporaryDirectory()
        self.store = opened_store(Path(self.directory.name), clock)
        kv_settings = KvSettings(max_lease_seconds=MAX_LEASE_SECONDS)
        self.table = HandleIndex(
            self.store, kv_settings, replica_id=REPLICA, clock=clock, max_leases=MAX_LEASES
        )
        self.entry = committed(self.store, self.table)
        self.entry.num_handles += 1  # outlives its handles
        self.held: set[Handle] = set()
        self.deadlines: dict[Handle, tuple[float, float]] = {}

    def clock(self) -> float:
        return self.now

    def teardown(self) -> None:
        self.store.arena.close()
        self.directory.cleanup()

    @rule(target=handles, seconds=SECONDS)
    def grant(self, seconds: float) -> Handle:
        handle = self.table.grant("me", self.entry, seconds)
        assert handle.lease_seconds == min(seconds, MAX_LEASE_SECONDS)
        self.held.add(handle)
        return handle

    @rule(handle=handles)
    def start(self, handle: Handle) -> None:
        handle.start_lease()
        if handle in self.held:
            self.held.remove(handle)
            deadline = self.now + handle.lease_seconds
            self.deadlines[handle] = (deadline, self.now + MAX_LIFETIME_SECONDS)

    @rule(handle=handles, seconds=SECONDS)
    def renew(self, handle: Handle, seconds: float) -> None:
        before = handle.remaining_seconds
        left = handle.renew(seconds)
        if not self.is_active(handle):
            assert left == 0, "an ended lease is never revived"
        elif handle in self.deadlines:
            deadline, last = self.deadlines[handle]
            requested = min(self.now + min(seconds, MAX_LEASE_SECONDS), last)
            self.deadlines[handle] = (max(deadline, requested), last)
            assert left == self.deadlines[handle][0] - self.now
            assert left >= before, "never shortened"

    @rule(handle=handles)
    def release(self, handle: Handle) -> None:
        self.table.release(handle.id, "me")
        self.held.discard(handle)
        self.deadlines.pop(handle, None)

    @rule(seconds=st.integers(1, 70))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        self.table.sweep()
        self.deadlines = {h: known for h, known in self.deadlines.items() if self.is_active(h)}
        assert set(self.table) == self.held | set(self.deadlines)

    @invariant()
    def exactly_the_active_leases_are_active(self) -> None:
        for handle in [*self.held, *self.deadlines]:
            assert handle.is_active == self.is_active(handle)

    def is_active(self, handle: Handle) -> bool:
        return handle in self.held or self.deadlines.get(handle, (0.0, 0.0))[0] > self.now

    @rule(handle=handles)
    def get(self, handle: Handle) -> None:
        if self.is_active(handle):
            assert self.table.get(handle.id, "me") is handle
            return
        try:
            self.table.get(handle.id, "me")
        except KvGone:
            self.deadlines.pop(handle, None)
        else:
            raise AssertionError("an ended lease is readable")


LeaseMachine.TestCase.settings = settings(
    max_examples=num_examples(60),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
)
TestLeases = LeaseMachine.TestCase
