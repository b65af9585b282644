"""Structured outputs are checked in another process: hostile ones are refused within the limit."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import xgrammar
from transformers import AutoTokenizer

from engine.errors import ChecksUnavailable, SamplingRefused
from engine.io import grammar_check
from engine.io.grammar_check import GrammarChecker, xgrammar_source
from engine.io.request_params import sampling_params
from engine.launch.sampling_hooks import BudgetedGrammar
from engine.types import SampleRequest, Sampling, StructuredOutputs
from tests.engine.seedling import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")

MANY = range(300)
AMBIGUOUS = 'root ::= root root | "a" | ""'
CIRCULAR = "\n".join(
    [
        "root ::= " + " ".join(f"r{i}" for i in MANY),
        *(f'r{i} ::= ("a" | "b")* r{(i + 1) % len(MANY)} | ""' for i in MANY),
    ]
)
OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}


def tokenizer_info() -> str:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    return str(info.serialize_json())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(tokenizer_info)
    yield checker
    await checker.close()


@pytest.mark.parametrize(
    "outputs",
    [
        {"json": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
        {"regex": "(a+)+b"},
        {"regex": "(.*a){25}"},
        {"choice": ("yes", 'no "quoted"\n')},
        {"choice": tuple(f"choice {i}" for i in range(1024))},
        {"grammar": 'root ::= "a" root | "b"'},
        {"grammar": 'start: "a" | "b"'},
        {"json_object": True},
    ],
)
async def test_constraint_is_accepted(checker: GrammarChecker, outputs: dict[str, Any]) -> None:
    await checker.check(StructuredOutputs(**outputs))


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": '"text"'}, "must be an object"),
        ({"json": '{"type": "integer", "multipleOf": 2}'}, "not support"),
        ({"json": "[" * 65 + "]" * 65}, "nested too deeply"),
        ({"json": "[" * 30_000}, "nested too deeply"),
        ({"regex": "(a"}, "structured_outputs: ."),
        ({"regex": "a\x00"}, "NUL"),
        ({"grammar": "root ::= missing"}, "structured_outputs: ."),
        ({"structural_tag": "[]"}, "structural tag"),
        ({"grammar": AMBIGUOUS}, "takes"),
        ({"grammar": CIRCULAR}, "takes"),
        ({"regex": "((a{1,100}){1,100}){1,100}"}, "takes"),
    ],
)
async def test_constraint_is_refused_with_a_reason(
    checker: GrammarChecker, outputs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SamplingRefused, match=reason) as refused:
        await checker.check(StructuredOutputs(**outputs))
    assert refused.value.field == "structured_outputs"


async def test_check_past_the_limit_is_ended_and_the_next_one_succeeds() -> None:
    checker = GrammarChecker(tokenizer_info, limit_seconds=0.001)
    with pytest.raises(SamplingRefused, match=r"longer than 0\.001 s"):
        await checker.check(StructuredOutputs(json=json.dumps(OPTIONAL)))
    checker._limit_seconds = 60.0
    await checker.check(StructuredOutputs(regex="a+"))
    await checker.close()


async def test_event_loop_runs_on_while_a_hostile_grammar_is_checked(
    checker: GrammarChecker,
) -> None:
    checking = asyncio.create_task(checker.check(StructuredOutputs(grammar=CIRCULAR + "\n")))
    num_turns = 0
    while not checking.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    with pytest.raises(SamplingRefused):
        await checking
    assert num_turns > 100


async def test_result_of_a_check_is_remembered(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = StructuredOutputs(regex="remembered")
    await checker.check(outputs)
    monkeypatch.setattr(grammar_check, "_exchange", None)
    await checker.check(outputs)


async def test_cancelled_check_does_not_answer_the_next_one(checker: GrammarChecker) -> None:
    cancelled = asyncio.create_task(checker.check(StructuredOutputs(grammar=CIRCULAR + "\n\n")))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await checker.check(StructuredOutputs(regex="next"))


async def test_failed_start_is_an_error_of_its_own_and_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checker, outputs = GrammarChecker(tokenizer_info), StructuredOutputs(regex="a")
    with monkeypatch.context() as patched:
        patched.setattr(grammar_check, "START_SECONDS", 0.0)
        with pytest.raises(ChecksUnavailable):
            await checker.check(outputs)
    await checker.check(outputs)
    await checker.close()


async def test_check_continues_without_its_caller(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check(StructuredOutputs(regex="before"))
    process, outputs, go = checker._process, StructuredOutputs(regex="shielded"), asyncio.Event()
    exchange = grammar_check._exchange

    async def delayed(process: Any, line: str) -> Any:
        await go.wait()
        return await exchange(process, line)

    monkeypatch.setattr(grammar_check, "_exchange", delayed)
    checking = asyncio.create_task(checker.check(outputs))
    await asyncio.sleep(0.1)
    checking.cancel()
    await asyncio.gather(checking, return_exceptions=True)
    go.set()
    await checker.check(StructuredOutputs(regex="next one"))
    monkeypatch.setattr(grammar_check, "_exchange", None)
    await checker.check(outputs)
    assert checker._process is process


async def test_source_is_that_of_the_backend_of_vllm() -> None:
    assert xgrammar_source(StructuredOutputs(choice=("a", "b"))) == (
        "grammar",
        'root ::= "a" | "b"',
    )
    assert xgrammar_source(StructuredOutputs(json_object=True))[0] == "json_schema"


async def test_choices_of_a_request_are_converted_once() -> None:
    sampling = Sampling(max_tokens=1, structured_outputs=StructuredOutputs(choice=("a", "b")))
    samples = [SampleRequest(id=name, prompt_token_ids=[1], sampling=sampling) for name in "ab"]
    first, second = [sampling_params(sample, 512).structured_outputs for sample in samples]
    assert first.grammar == 'root ::= "a" | "b"'
    assert first.grammar is second.grammar


class SlowGrammar:
    """Each call takes as long as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = 0.0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.now += self.seconds
        return True


async def test_request_whose_grammar_becomes_slow_is_ended() -> None:
    grammar = SlowGrammar()
    budgeted = BudgetedGrammar(grammar, clock=lambda: grammar.now)
    grammar.seconds = 0.004
    assert all(budgeted.accept_tokens("r", [1]) for _ in range(2000))
    grammar.seconds = 0.05
    assert [budgeted.accept_tokens("r", [1]) for _ in range(40)].count(False) > 10
