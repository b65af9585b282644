"""CPU time budget of each grammar in EngineCore's steps, in a separate thread.

The time per token may grow with an ambiguous grammar's text, and all requests wait for the step.
xgrammar cannot be interrupted. So the grammars of a step are advanced, and its masks filled, in a
thread of their own. All requests with the same grammar share a budget. If one call uses it up, the
thread is left to itself at the lowest priority, another one takes over, and the grammar is not used
again. Its requests end as one whose token its grammar rejects: with an error.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

log = logging.getLogger(__name__)
Result = TypeVar("Result")
BUDGET_SECONDS: Final = 0.1
SECONDS_PER_CALL: Final = 0.001
"""Time that a call may take on average after the budget's first seconds are used up."""
POLL_SECONDS: Final = 0.01
OVERRUN: Final = "structured_outputs"
"""`stop_reason` of a request that ended because its grammar's budget is used up."""


class Budget:
    """CPU time that is left to the requests of one grammar."""

    def __init__(self) -> None:
        self.left = BUDGET_SECONDS

    @property
    def is_used_up(self) -> bool:
        return self.left <= 0

    def spend(self, seconds: float) -> None:
        """Take the time of one call; a budget that is used up remains so."""
        if not self.is_used_up:
            self.left = min(self.left - seconds + SECONDS_PER_CALL, BUDGET_SECONDS)


class Abandoned(Exception):  # no error: ends the thread
    """Another thread has taken over the work of this one."""


class _Call(NamedTuple):
    budget: Budget
    began_at: float


class _Job:
    """Work of the grammar thread, with its running call of xgrammar."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_abandoned = False
        self._call: _Call | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error
        self.done.set()

    @contextmanager
    def timed(self, budget: Budget, clock: Callable[[], float]) -> Iterator[None]:
        """One call of xgrammar. Raises Abandoned after it if the call took too long."""
        call = self._call = _Call(budget, clock())
        try:
            yield
        finally:
            with self._lock:
                self._call = None
                budget.spend(clock() - call.began_at)
                if self.is_abandoned:
                    raise Abandoned

    def abandon_if_late(self, now: float) -> bool:
        """Abandon the job if its running call has used up the budget; `now` is its thread's."""
        with self._lock:
            call = self._call
            if call is not None and now - call.began_at > call.budget.left:
                call.budget.left = 0.0
                self.is_abandoned = True
        return self.is_abandoned


class GrammarThread:
    """Runs the work of one step at a time, while the engine's thread waits."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], Result], on_abandoned: Callable[[], None]) -> Result:
        """Result of `work`, which is begun again each time that a grammar was abandoned."""
        while True:
            job = _Job(work)
            jobs, thread = self._started()
            jobs.put(job)
            clock = time.pthread_getcpuclockid(_ident(thread))
            while not job.done.wait(POLL_SECONDS):
                if job.abandon_if_late(time.clock_gettime(clock)):
                    break
            else:
                if job.error is not None:
                    raise job.error
                result: Result = job.result
                return result
            self._leave(thread)
            on_abandoned()

    def _started(self) -> tuple["SimpleQueue[_Job]", threading.Thread]:
        if self._thread is None or self._jobs is None:
            self._jobs = SimpleQueue()
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="grammars", daemon=True
            )
            self._thread.start()
        return self._jobs, self._thread

    def _leave(self, thread: threading.Thread) -> None:
        log.warning(
            "a grammar took more than %g s of CPU time in the engine's steps: its samples end "
            "with an error",
            BUDGET_SECONDS,
        )
        self._thread = self._jobs = None
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, 19)


_local = threading.local()
_thread = GrammarThread()
_budgets: WeakValueDictionary[Any, Budget] = WeakValueDictionary()
_budgets_lock = threading.Lock()


def _ident(thread: threading.Thread) -> int:
    assert thread.ident is not None, "the thread is started"
    return thread.ident


def _work(jobs: "SimpleQueue[_Job]") -> None:
    while True:
        job = _local.job = jobs.get()
        job.run()
        if job.is_abandoned:
            return


def budget_of(key: Any) -> Budget:
    """Budget of all live requests with the same constraint. Raises ValueError if it is used up."""
    with _budgets_lock:
        budget = _budgets.get(key) or Budget()
        _budgets[key] = budget
    if budget.is_used_up:
        raise ValueError("structured_outputs: sampling with it has taken too long")
    return budget


class BudgetedGrammar:
    """Compiled grammar of one request, which spends the budget of its constraint.

    Outside the grammar thread accepted tokens are only recorded, and the next call in the thread
    advances the grammar by them.
    """

    def __init__(
        self, grammar: Any, budget: Budget, clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._grammar = grammar
        self._budget = budget
        self._clock = clock
        self._recorded: list[int] = []
        self._has_rejected = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grammar, name)

    @property
    def is_used_up(self) -> bool:
        return self._budget.is_used_up

    @property
    def _is_lost(self) -> bool:
        return self._has_rejected or self._budget.is_used_up

    def accept_tokens(self, request_id: str, tokens: Sequence[int]) -> bool:
        if _current_job() is None:
            self._recorded += tokens
            return not self._is_lost
        self._catch_up()
        return self.advance(request_id, tokens)

    def advance(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Accept tokens at once, in the calling thread, until the budget is used up."""
        for token in tokens:
            if self._is_lost:
                return False
            with self._timed():
                accepted = self._grammar.accept_tokens(request_id, [token])
            if not accepted:
                return False
        return not self._is_lost

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        self._catch_up()
        if self._is_lost:
            bitmask[index].fill_(-1)
            return
        with self._timed():
            self._grammar.fill_bitmask(bitmask, index)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        self._catch_up()
        if self._is_lost:
            return []
        with self._timed():
            return list(self._grammar.validate_tokens(tokens))

    def is_terminated(self) -> bool:
        self._catch_up()
        return bool(self._grammar.is_terminated())

    def rollback(self, num_tokens: int) -> None:
        if not self._is_lost:
            self._grammar.rollback(num_tokens)

    def _catch_up(self) -> None:
        tokens, self._recorded = self._recorded, []
        if tokens and not self.advance("", tokens):
            self._has_rejected = True

    @contextmanager
    def _timed(self) -> Iterator[None]:
        job = _current_job() or _Job(lambda: None)
        with job.timed(self._budget, self._clock):
            yield


def _current_job() -> _Job | None:
    return getattr(_local, "job", None)


def in_grammar_thread(method: Callable[..., Any]) -> Callable[..., Any]:
    """Method of vLLM's StructuredOutputManager that runs in the grammar thread."""

    def call(self: Any, *args: Any) -> Any:
        def forget_mask() -> None:
            self._grammar_bitmask = None  # the thread that is left behind may write to it

        self.fill_bitmask_parallel_threshold = sys.maxsize  # vLLM's own threads have no limit
        return _thread.run(lambda: method(self, *args), forget_mask)

    return call
