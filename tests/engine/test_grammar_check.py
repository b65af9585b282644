"""Structured outputs are checked in another process: hostile ones are refused within the limit."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
import pytest_asyncio
import xgrammar
from transformers import AutoTokenizer

from engine.errors import ChecksUnavailable, SamplingRefused
from engine.fair_limiter import LONG_SECONDS
from engine.requests import grammar_check
from engine.requests.grammar_check import LIMIT_SECONDS, GrammarChecker, xgrammar_source
from engine.requests.request_params import sampling_params
from engine.types.samples import SampleRequest, Sampling, StructuredOutputs
from tests.engine.seedling import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="module")


def nullable_rules() -> str:
    """Grammar that is slow only after `a`: each rule of two others, or empty, in many ways."""
    choice, rules = random.Random(0), range(30)
    lines = ['root ::= [^a] | "a" r0 r0']
    for rule in rules:
        pairs = [f"r{choice.choice(rules)} r{choice.choice(rules)}" for _ in range(6)]
        lines.append(f'r{rule} ::= {" | ".join(pairs)} | "a" | ""')
    return "\n".join(lines)


MANY = range(300)
AMBIGUOUS = 'root ::= root root | "a" | ""'
CIRCULAR = "\n".join(
    [
        "root ::= " + " ".join(f"r{i}" for i in MANY),
        *(f'r{i} ::= ("a" | "b")* r{(i + 1) % len(MANY)} | ""' for i in MANY),
    ]
)
AFTER_A = 'root ::= [^a] | "a" s\ns ::= s s | "a" | ""'
NULLABLE = nullable_rules()
SLOW = "(a|b?)" * 2700
HEAVY = "(a|b?)" * 1800
"""A slow processor does not compile it within `LIMIT_SECONDS`, a fast one does."""
OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}


def tokenizer_info() -> str:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    return str(info.serialize_json())


def constrained(*, bias: str = "", allowed: str = "", **outputs: Any) -> Sampling:
    """Parameters with a constraint, and a bias for one token or one token that is allowed."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return Sampling(
        max_tokens=1,
        logit_bias=dict.fromkeys(tokenizer.encode(bias), 100.0),
        allowed_token_ids=tuple(tokenizer.encode(allowed)) if allowed else None,
        structured_outputs=StructuredOutputs(**outputs),
    )


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
    await checker.check(constrained(**outputs))


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
        ({"regex": HEAVY}, "compiling it takes too long|longer than 10 s"),
        ({"grammar": AFTER_A, "bias": "a"}, "takes"),
        ({"grammar": AFTER_A, "allowed": "a"}, "takes"),
        ({"grammar": NULLABLE, "bias": "a"}, "takes"),
    ],
)
async def test_constraint_is_refused_with_a_reason(
    checker: GrammarChecker, outputs: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SamplingRefused, match=reason) as refused:
        await checker.check(constrained(**outputs))
    assert refused.value.field == "structured_outputs"


async def test_check_past_the_limit_is_ended_and_the_next_one_succeeds() -> None:
    checker = GrammarChecker(tokenizer_info, limit_seconds=0.001)
    with pytest.raises(SamplingRefused, match=r"longer than 0\.001 s"):
        await checker.check(constrained(json=json.dumps(OPTIONAL)))
    checker._limit_seconds = 60.0
    await checker.check(constrained(regex="a+"))
    await checker.close()


async def test_event_loop_runs_on_while_a_hostile_grammar_is_checked(
    checker: GrammarChecker,
) -> None:
    checking = asyncio.create_task(checker.check(constrained(grammar=CIRCULAR + "\n")))
    num_turns = 0
    while not checking.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    with pytest.raises(SamplingRefused):
        await checking
    assert num_turns > 100


async def test_check_does_not_wait_for_a_slow_one_of_another_key() -> None:
    checker = GrammarChecker(tokenizer_info, limit_seconds=2.0)
    slow = asyncio.create_task(checker.check(constrained(regex=SLOW), "hostile"))
    while not checker._checking:
        await asyncio.sleep(0.001)
    await checker.check(constrained(regex="quick"), "other")
    assert not slow.done()
    with pytest.raises(SamplingRefused, match="longer than 2 s of CPU time"):
        await slow
    await checker.close()


async def test_heavy_regexes_of_two_keys_do_not_delay_another() -> None:
    checker = GrammarChecker(tokenizer_info, limit_seconds=LONG_SECONDS + 0.5)

    def heavy(name: str, key: str) -> "asyncio.Task[None]":
        return asyncio.create_task(checker.check(constrained(regex=SLOW + name), key))

    first = await asyncio.gather(*(heavy("first", key) for key in "ab"), return_exceptions=True)
    assert [type(error) for error in first] == [SamplingRefused] * 2
    checker._limit_seconds = LIMIT_SECONDS
    hostile = [heavy(f"{key}{number}", key) for number in range(3) for key in "ab"]
    while not checker._checking:
        await asyncio.sleep(0.001)
    for number in range(3):
        await checker.check(constrained(regex=f"quick{number}"), "other")
    assert not any(task.done() for task in hostile)
    await checker.close()
    ended = await asyncio.gather(*hostile, return_exceptions=True)
    assert [type(error) for error in ended] == [ChecksUnavailable] * 6


async def test_failed_start_is_an_error_of_its_own_and_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checker, outputs = GrammarChecker(tokenizer_info), constrained(regex="a")
    with monkeypatch.context() as patched:
        patched.setattr(grammar_check, "START_SECONDS", 0.0)
        with pytest.raises(ChecksUnavailable):
            await checker.check(outputs)
    await checker.check(outputs)
    await checker.close()


async def test_process_that_has_ended_is_started_again(checker: GrammarChecker) -> None:
    await checker.check(constrained(regex="before"))
    assert checker._worker is not None
    checker._worker._process.kill()
    await checker._worker._process.wait()
    with suppress(ChecksUnavailable):  # the end may be seen only by the next check
        await checker.check(constrained(regex="seen"))
    await checker.check(constrained(regex="after"))


async def test_children_end_with_the_process() -> None:
    checker = GrammarChecker(tokenizer_info)
    checking = asyncio.create_task(checker.check(constrained(regex=SLOW)))
    while not checker._checking:
        await asyncio.sleep(0.001)
    assert checker._worker is not None
    worker = psutil.Process(checker._worker._process.pid)
    while not (children := worker.children()):
        await asyncio.sleep(0.001)
    await checker.close()
    assert psutil.wait_procs(children, timeout=10)[1] == []
    with pytest.raises(ChecksUnavailable):
        await checking


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
