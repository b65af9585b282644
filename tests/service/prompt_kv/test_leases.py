"""The lease table against a model of every lease's deadline, on a clock set by the test."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from service.prompt_kv.leases import Leases

MAX_SECONDS = 60.0
MAX_LIFETIME_SECONDS = 150.0
SECONDS = st.integers(1, 100).map(float)


class Table(RuleBasedStateMachine):
    """The model has, per lease, none, or its deadline and its latest possible deadline."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.leases = Leases(
            max_seconds=MAX_SECONDS,
            max_lifetime_seconds=MAX_LIFETIME_SECONDS,
            clock=lambda: self.now,
        )
        self.held: set[str] = set()
        self.deadlines: dict[str, tuple[float, float]] = {}
        self.count = 0

    @rule(target=handles)
    def hold(self) -> str:
        self.count += 1
        handle = f"h{self.count}"
        self.leases.hold(handle)
        self.held.add(handle)
        return handle

    @rule(handle=handles, seconds=SECONDS)
    def begin(self, handle: str, seconds: float) -> None:
        self.leases.begin(handle, seconds)
        if handle in self.held:
            self.held.remove(handle)
            deadline = self.now + min(seconds, MAX_SECONDS)
            self.deadlines[handle] = (deadline, self.now + MAX_LIFETIME_SECONDS)

    @rule(handle=handles, seconds=SECONDS)
    def renew(self, handle: str, seconds: float) -> None:
        before = self.leases.remaining_seconds(handle)
        left = self.leases.renew(handle, seconds)
        if not self.is_active(handle):
            assert left is None, "nothing rises again"
        elif handle in self.deadlines:
            deadline, last = self.deadlines[handle]
            wanted = min(self.now + min(seconds, MAX_SECONDS), last)
            self.deadlines[handle] = (max(deadline, wanted), last)
            assert left == self.deadlines[handle][0] - self.now
            assert before is not None and left >= before, "never shortened"

    @rule(handle=handles)
    def end(self, handle: str) -> None:
        self.leases.end(handle)
        self.held.discard(handle)
        self.deadlines.pop(handle, None)

    @rule(seconds=st.integers(1, 70))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        expired = self.leases.expired()
        assert set(expired) == {h for h in self.deadlines if not self.is_active(h)}
        for handle in expired:
            self.end(handle)

    @invariant()
    def everybody_alive_is_known_to_be(self) -> None:
        assert len(self.leases) == len(self.held) + len(self.deadlines)
        for handle in [*self.held, *self.deadlines]:
            assert self.leases.is_active(handle) == self.is_active(handle)

    def is_active(self, handle: str) -> bool:
        return handle in self.held or self.deadlines.get(handle, (0.0, 0.0))[0] > self.now


Table.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestTable = Table.TestCase
