"""Grammars that take too long in EngineCore's steps are given up; the step continues without."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine.sampling.grammar_budget import (
    BUDGET_SECONDS,
    OVERRUN,
    Budget,
    BudgetedGrammar,
    budget_of,
    in_grammar_thread,
)
from engine.sampling.request_hooks import naming_overruns


class Row:
    def __init__(self) -> None:
        self.value: int | None = None

    def fill_(self, value: int) -> None:
        self.value = value


class FakeGrammar:
    """Each call takes as long as the test says. `fill_bitmask` uses the CPU until `go` is set."""

    def __init__(self, *, runs_away: bool = False, seconds: float = 0.0) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.accepted: list[int] = []
        self.go = threading.Event()
        self.threads: list[threading.Thread] = []
        if not runs_away:
            self.go.set()

    def accept_tokens(self, request_id: str, tokens: Sequence[int]) -> bool:
        self.now += self.seconds
        self.accepted += tokens
        return tokens != [0]

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        self.threads.append(threading.current_thread())
        self.now += self.seconds
        while not self.go.is_set():
            pass
        bitmask[index].fill_(len(self.accepted))

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[:1]

    def is_terminated(self) -> bool:
        return False


class Manager:
    """The part of vLLM's StructuredOutputManager that fills masks."""

    def __init__(self) -> None:
        self._grammar_bitmask: list[Row] | None = None

    @in_grammar_thread
    def fill(self, grammars: Sequence[BudgetedGrammar]) -> list[int | None]:
        if self._grammar_bitmask is None:
            self._grammar_bitmask = [Row() for _ in grammars]
        for index, grammar in enumerate(grammars):
            if not grammar.is_terminated():
                grammar.fill_bitmask(self._grammar_bitmask, index)
        return [row.value for row in self._grammar_bitmask]


def budgeted(grammar: FakeGrammar, budget: Budget | None = None) -> BudgetedGrammar:
    return BudgetedGrammar(grammar, budget or Budget(), lambda: grammar.now)


def test_step_continues_without_a_grammar_that_runs_away() -> None:
    runaway, other = FakeGrammar(runs_away=True), FakeGrammar()
    grammar, sibling = (BudgetedGrammar(runaway, budget) for budget in [Budget()] * 2)
    before, after = (BudgetedGrammar(other, Budget()) for _ in range(2))
    manager = Manager()
    assert manager.fill([before, grammar, sibling, after]) == [0, -1, -1, 0]
    assert len(runaway.threads) == 1
    assert not grammar.accept_tokens("r", [1]) and not sibling.accept_tokens("s", [1])
    assert before.accept_tokens("b", [1])
    mask = manager._grammar_bitmask
    runaway.go.set()
    runaway.threads[0].join(30)
    assert not runaway.threads[0].is_alive()
    assert mask is not None and [row.value for row in mask] == [0, -1, -1, 0]


def test_requests_share_the_budget_of_their_grammar() -> None:
    budget, manager = Budget(), Manager()
    grammars = [budgeted(FakeGrammar(seconds=BUDGET_SECONDS / 8), budget) for _ in range(20)]
    rows = manager.fill(grammars)
    assert 5 < rows.count(0) < 12 and rows.index(-1) == rows.count(0)
    assert not any(grammar.accept_tokens("r", [1]) for grammar in grammars)


def test_time_of_each_call_is_limited_on_average() -> None:
    grammar = FakeGrammar(seconds=0.0009)
    limited = budgeted(grammar)
    assert all(limited.advance("r", [1]) for _ in range(2000))
    grammar.seconds = 0.01
    assert not all(limited.advance("r", [1]) for _ in range(20))


def test_grammar_is_advanced_in_the_step_before_the_mask() -> None:
    grammar = FakeGrammar()
    limited, manager = budgeted(grammar), Manager()
    assert limited.accept_tokens("r", [5, 6]) and limited.accept_tokens("r", [7])
    assert grammar.accepted == []
    assert manager.fill([limited]) == [3]
    assert grammar.accepted == [5, 6, 7]


def test_request_ends_after_a_token_that_its_grammar_rejects() -> None:
    limited, manager = budgeted(FakeGrammar()), Manager()
    assert limited.accept_tokens("r", [0])
    assert manager.fill([limited]) == [-1]
    assert not limited.accept_tokens("r", [1])


def test_error_in_the_thread_is_raised_in_the_step() -> None:
    with pytest.raises(AttributeError):
        Manager().fill([SimpleNamespace()])
    assert Manager().fill([budgeted(FakeGrammar())]) == [0]


def test_budget_that_is_used_up_refuses_further_requests() -> None:
    budget = budget_of(("regex", "slow"))
    assert budget_of(("regex", "slow")) is budget
    budget.spend(BUDGET_SECONDS + 1)
    with pytest.raises(ValueError, match="too long"):
        budget_of(("regex", "slow"))
    del budget
    assert not budget_of(("regex", "slow")).is_used_up


@pytest.mark.parametrize("is_used_up", [False, True])
def test_stop_reason_names_a_grammar_that_was_too_slow(is_used_up: bool) -> None:
    grammar = SimpleNamespace(is_used_up=is_used_up)
    request = SimpleNamespace(
        structured_output_request=SimpleNamespace(grammar=grammar), stop_reason=None
    )
    for accepts in (True, False):
        assert request.stop_reason is None
        accept_tokens = naming_overruns(lambda manager, request, tokens, accepts=accepts: accepts)
        assert accept_tokens(None, request, [1]) == accepts
    assert request.stop_reason == (OVERRUN if is_used_up else None)
