"""Structured outputs over HTTP, on the real engine: whole texts satisfy their constraint."""

import asyncio
import json
import re
from typing import Any

import httpx
import numpy as np
import pytest

from coppice.wire.columns.support import GivenSupport, decode_mask, rows_of
from tests.service.trees import check_tree, path
from tests.serving import Served

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

PROMPT = "Compute 12+34.\n"
COLOURS = ["red", "green", "blue"]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": COLOURS}, "warm": {"type": "boolean"}},
    "required": ["colour", "warm"],
    "additionalProperties": False,
}
PAINT = {
    "type": "function",
    "function": {"name": "paint", "parameters": SCHEMA, "strict": True},
}
GRAMMAR = 'root ::= "(" [0-9] [0-9] "," [a-f] [a-f] ")"'
CIRCULAR = "\n".join(
    [
        "root ::= " + " ".join(f"r{i}" for i in range(300)),
        *(f'r{i} ::= ("a" | "b")* r{(i + 1) % 300} | ""' for i in range(300)),
    ]
)


def is_painting(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"colour", "warm"} and value["colour"] in COLOURS


async def group_of(served: Served, sampling: dict[str, Any], **fields: Any) -> Any:
    asked = {
        "groups": [{"prompt": {"text": PROMPT}, "n": 3}],
        "sampling": {"max_tokens": 64, **sampling},
        **fields,
    }
    answer = await served.http.post("/v1/rollouts", json=asked)
    assert answer.status_code == 200, answer.text
    [group] = answer.json()["groups"]
    return group


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"json": SCHEMA}, r'\{"colour":"(red|green|blue)","warm":(true|false)\}'),
        ({"regex": "[a-c]{3}[0-9]{2,9}"}, "[a-c]{3}[0-9]{2,9}"),
        ({"choice": COLOURS}, "red|green|blue"),
        ({"grammar": GRAMMAR}, r"\([0-9]{2},[a-f]{2}\)"),
    ],
)
async def test_rollouts_return_texts_of_the_grammar_and_their_supports(
    served: Served, outputs: dict[str, Any], pattern: str
) -> None:
    group = await group_of(served, {"structured_outputs": outputs}, return_support=True)
    for sample in group["samples"]:
        assert sample["finish_reason"] == "stop"
        assert re.fullmatch(pattern, sample["text"])
        given = GivenSupport(**sample["support"])
        masks = [decode_mask(row, given.vocab_size) for row in rows_of(given)]
        assert len(masks) == len(sample["token_ids"])
        assert all(mask[token] for mask, token in zip(masks, sample["token_ids"], strict=True))
        assert np.mean([mask.sum() for mask in masks]) < 30


async def test_continued_samples_satisfy_the_grammar_as_a_whole(served: Served) -> None:
    """Cut by `max_tokens` at several lengths, and continued with the supports of the first part."""
    regex = "([0-9][a-f]){8,12}!"
    sampling = {"structured_outputs": {"regex": regex}}
    for length in (1, 6, 15):
        cut = await group_of(served, {**sampling, "max_tokens": length}, return_support=True)
        names = ("token_ids", "logprobs", "versions", "support")
        given = [
            {"group": 0, **{name: sample[name] for name in names}} for sample in cut["samples"]
        ]
        whole = await group_of(
            served, sampling, return_support=True, continue_from={"samples": given}
        )
        for sample, begun in zip(whole["samples"], cut["samples"], strict=True):
            assert sample["token_ids"][:length] == begun["token_ids"]
            assert sample["finish_reason"] == "stop"
            assert re.fullmatch(regex, sample["text"])
            assert len(sample["support"]["lengths"]) == len(sample["token_ids"])


async def test_leaves_of_a_tree_satisfy_the_grammar_as_a_whole(served: Served) -> None:
    regex = "([0-9][a-f]){8,12}!"
    fields = {
        "groups": [{"prompt": {"text": PROMPT}}],
        "branching": {"mode": "interval", "interval": 5, "max_depth": 3, "max_leaves": 6},
    }
    group = await group_of(served, {"structured_outputs": {"regex": regex}}, **fields)
    check_tree(group)
    assert len(group["leaves"]) == 6
    engine: Any = served.server.engine
    for leaf in group["leaves"]:
        tokens = [token for segment in path(group, leaf) for token in segment["token_ids"]]
        assert re.fullmatch(regex, engine.decode(tokens))


CHATS: list[tuple[dict[str, Any], str]] = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            }
        },
        r'\{"colour":"(red|green|blue)","warm":(true|false)\}',
    ),
    ({"structured_outputs": {"choice": COLOURS}}, "red|green|blue"),
    ({"structured_outputs": {"regex": "[a-c]{3}!"}}, "[a-c]{3}!"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("constraint", "pattern"), CHATS)
async def test_chat_completions_satisfy_their_constraint(
    served: Served, constraint: dict[str, Any], pattern: str, stream: bool
) -> None:
    choice = await chat(served, stream=stream, **constraint)
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, choice["content"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "finish_reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "paint"}}, "stop")],
)
async def test_forced_tool_call_has_arguments_of_its_schema(
    served: Served, choice: Any, finish_reason: str, stream: bool
) -> None:
    async with httpx.AsyncClient(base_url=served.url) as http:  # not in the contract
        blanks = (await http.post("/tokenize", json={"prompt": " \n\t\r"})).json()["tokens"]
    fields = {
        "tools": [PAINT],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        # The constraint allows any number of blanks.
        "logit_bias": {str(token): -100 for token in blanks},
    }
    found = await chat(served, stream=stream, **fields)
    assert found["finish_reason"] == finish_reason
    functions = [call["function"] for call in found["tool_calls"]]
    assert functions[0]["name"] == "paint"
    assert is_painting("".join(each.get("arguments") or "" for each in functions))


async def chat(served: Served, *, stream: bool, **fields: Any) -> dict[str, Any]:
    """Finish reason, content and tool calls of an answer, joined from its parts if streamed."""
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 800,
        "seed": 5,
        "stream": stream,
        **fields,
    }
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:  # not in the contract
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        [choice] = answer.json()["choices"]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}
    lines = [line for line in answer.text.split("\n\n") if line][:-1]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    return {
        "content": "".join(choice["delta"].get("content") or "" for choice in choices),
        "tool_calls": [c for choice in choices for c in choice["delta"].get("tool_calls") or ()],
        "finish_reason": choices[-1]["finish_reason"],
    }


@pytest.mark.parametrize(
    "sampling",
    [
        {"structured_outputs": {"regex": "[0-9]{4}"}, "allowed_token_ids": list(range(17, 27))},
        {"allowed_token_ids": [17], "bad_words": ["00"]},
        {"allowed_token_ids": [1], "min_tokens": 3},
    ],
)
async def test_sample_whose_constraints_exclude_all_tokens_ends_before(
    served: Served, sampling: dict[str, Any]
) -> None:
    group = await group_of(served, {**sampling, "max_tokens": 8}, return_support=True)
    for sample in group["samples"]:
        assert sample["finish_reason"] == "error"
        assert all(logprob <= 0 for logprob in sample["logprobs"])
        assert len(sample["token_ids"]) == len(sample["support"]["lengths"]) < 8


async def test_hostile_grammar_is_refused_while_others_are_served(served: Served) -> None:
    body = {
        "groups": [{"prompt": {"text": PROMPT}}],
        "sampling": {"structured_outputs": {"grammar": CIRCULAR}},
    }
    refused = asyncio.create_task(served.http.post("/v1/rollouts", json=body))
    await asyncio.sleep(0)
    group = await group_of(served, {"max_tokens": 4})
    assert len(group["samples"]) == 3
    answer = await refused
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "structured_outputs" in answer.text
