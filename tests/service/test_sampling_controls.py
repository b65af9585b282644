"""Sampling controls of POST /v1/rollouts: how they reach the engine, and what they return."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from coppice.wire.sampling import Sampling, StructuredOutputs
from engine.errors import ChecksUnavailable, EngineError, QueueFull, SamplingRefused
from engine.requests.stop_text import response_text, tokens_of_text
from engine.types import samples as types
from service.rollouts.sampling import to_engine_sampling
from tests.fake_engine import FakeEngine
from tests.service.test_rollouts import body, group
from tests.serving import serving

CONTROLS: dict[str, Any] = {
    "max_tokens": 7,
    "min_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [1, 2],
    "bad_words": ["no"],
    "structured_outputs": {"regex": "a+"},
    "stop": ["x"],
    "stop_token_ids": [9],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "ignore_eos": True,
}


def test_engine_has_every_field_of_the_wire() -> None:
    assert {field.name for field in fields(types.Sampling)} == Sampling.model_fields.keys()
    kinds = {info.alias or name for name, info in StructuredOutputs.model_fields.items()}
    assert {field.name for field in fields(types.StructuredOutputs)} == kinds


@pytest.mark.parametrize("name", CONTROLS)
def test_every_control_reaches_the_engine(name: str) -> None:
    given = to_engine_sampling(Sampling.model_validate({name: CONTROLS[name]}), 100)
    default = to_engine_sampling(Sampling(), 100)
    assert CONTROLS.keys() == Sampling.model_fields.keys()
    assert getattr(given, name) != getattr(default, name)


def test_schema_is_given_as_an_object_or_as_text() -> None:
    schema = {"type": "object", "enum": [None, 1]}
    as_object = Sampling(structured_outputs=StructuredOutputs(json=schema))
    sent = Sampling.model_validate_json(as_object.model_dump_json(exclude_none=True))
    outputs = to_engine_sampling(sent, 10).structured_outputs
    assert outputs is not None and outputs.json == '{"type": "object", "enum": [null, 1]}'


async def test_sampling_is_converted_once_for_all_groups(tmp_path: Path) -> None:
    """Only the limits of the tokens differ."""
    engine = FakeEngine(max_context_tokens=100)
    sampling = {
        "structured_outputs": {"json": {"type": "object"}},
        "logit_bias": {"5": 1.5},
        "min_tokens": 95,
        "max_tokens": 97,
    }
    groups = [{"prompt": {"token_ids": [1] * length}} for length in (2, 10)]
    async with serving(engine, tmp_path) as served:
        answer = await served.http.post("/v1/rollouts", json=body(*groups, sampling=sampling))
        assert answer.status_code == 200, answer.text
    first, second = (request.sampling for request in engine.submitted)
    assert (first.min_tokens, first.max_tokens) == (95, 97)
    assert (second.min_tokens, second.max_tokens) == (90, 90)
    assert first.structured_outputs is second.structured_outputs
    assert first.logit_bias is second.logit_bias


@pytest.mark.parametrize(
    "value",
    [
        {"structured_outputs": {"regex": "a", "json_object": True}},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"json": "x" * 65_537}},
        {"structured_outputs": {"json": {"enum": ["x" * 65_537]}}},
        {"structured_outputs": {"choice": ["x" * 4096] * 17}},
        {"structured_outputs": {"whitespace_pattern": " ", "regex": "a"}},
        {"logit_bias": {"1": 101.0}},
        {"logit_bias": {"1": 1.0, "01": 1.0}},
        {"logit_bias": {"²": 1.0}},
        {"allowed_token_ids": []},
        {"repetition_penalty": 0.0},
        {"min_tokens": 1, "stop_token_ids": list(range(113))},
    ],
)
def test_value_out_of_bounds_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Sampling.model_validate(value)


def test_schema_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(64):
        schema = {"items": schema}
    StructuredOutputs(json=schema["items"])
    with pytest.raises(ValueError, match="64 levels"):
        StructuredOutputs(json=schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [1] * 65_537},
        {"x" * 65_537: 1},
        {"enum": [[]] * 65_537},
        {"a": {"b": "x" * 65_537}},
    ],
)
def test_schema_that_is_too_large_is_refused_before_it_is_dumped(
    monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any]
) -> None:
    monkeypatch.setattr(json, "dumps", None)
    with pytest.raises(ValueError, match="65536 characters"):
        StructuredOutputs(json=schema)


def test_schema_of_the_maximum_size_is_accepted() -> None:
    schema = {"enum": ["x" * (65_536 - len('{"enum": [""]}'))]}
    assert len(json.dumps(schema)) == 65_536
    StructuredOutputs(json=schema)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
async def test_stop_string_ends_the_sample_and_cuts_its_text(
    tmp_path: Path, include: bool, text: str
) -> None:
    """Prompts of 97 tokens are followed by the tokens "a", "b", and so on."""
    sampling = {"stop": ["zz", "cd"], "max_tokens": 9, "include_stop_str_in_output": include}
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body({"prompt": {"text": "p" * 97}}, sampling=sampling)
        answer = await served.http.post("/v1/rollouts", json=asked)
    [sample] = answer.json()["groups"][0]["samples"]
    assert sample["text"] == text
    assert bytes(sample["token_ids"]) == b"abcd"
    assert len(sample["logprobs"]) == 4
    assert (sample["finish_reason"], sample["stop_reason"]) == ("stop", "cd")


async def test_answer_without_a_stop_reason_lacks_the_field(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answer = await served.http.post("/v1/rollouts", json=body(group(1)))
    [sample] = answer.json()["groups"][0]["samples"]
    assert "stop_reason" not in sample


@pytest.mark.parametrize(
    ("tokens", "stop", "text"),
    [
        (["a", "\n", "b\n\nc"], "\n", "a\nb"),
        (["a", "b", "c"], "bc", "a"),
        (["a", "bcd"], "c", "ab"),
        (["a", "b"], 7, "ab"),
        (["a", "b"], "x", "ab"),
    ],
)
def test_text_is_cut_at_the_match_that_the_last_token_completes(
    tokens: list[str], stop: int | str, text: str
) -> None:
    def decode(token_ids: Any) -> str:
        return "".join(tokens[i] for i in token_ids)

    found = response_text(decode, range(len(tokens)), stop, include_stop_str=False)
    assert found == text


@pytest.mark.parametrize(
    ("tokens", "text", "found"),
    [
        (["a", "b", "c"], "ab", (2, "")),
        (["a", "bcd"], "abc", (1, "bc")),
        (["a", "", "b"], "a", (2, "")),
        (["ab", "c"], "", (0, "")),
        (["x"] * 40 + ["stop"], "x" * 40, (40, "")),
        (["a", "<e2>", "<82>", "<ac>", "b"], "a\u20acb", (5, "")),
        (["a", "<e2>", "<82>", "<ac>", "b"], "a\u20ac", (4, "")),
        (["a", "b"], "x", (0, "x")),
        (["a"] * 20, "x" * 20, None),
    ],
)
def test_tokens_of_a_text_are_the_longest_beginning_that_it_has(
    tokens: list[str], text: str, found: tuple[int, str] | None
) -> None:
    def decode(token_ids: Any) -> str:
        pieces = [
            bytes([int(tokens[i][1:3], 16)]) if tokens[i][:1] == "<" else tokens[i].encode()
            for i in token_ids
        ]
        return b"".join(pieces).decode(errors="replace")

    assert tokens_of_text(decode, range(len(tokens)), text) == found


async def test_stop_string_may_begin_in_the_tokens_of_a_resumed_sample(tmp_path: Path) -> None:
    """The resumed sample has the tokens "a" and "b", and is followed by "c"."""
    resumed = {
        "token_ids": list(b"ab"),
        "logprobs": [-1.0, -1.0],
        "versions": [{"version": "v0", "start": 0, "end": 2}],
    }
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body(
            {"prompt": {"text": "p" * 97}},
            sampling={"stop": ["bc"], "max_tokens": 9},
            continue_from={"samples": [resumed]},
        )
        answer = await served.http.post("/v1/rollouts", json=asked)
    [sample] = answer.json()["groups"][0]["samples"]
    assert bytes(sample["token_ids"]) == b"abc"
    assert (sample["text"], sample["stop_reason"]) == ("a", "bc")


async def test_engine_knows_the_earlier_tokens_of_a_response(tmp_path: Path) -> None:
    """Of a resumed sample and of a tree's paths; `min_tokens` no longer counts them."""
    resumed = {
        "token_ids": [5, 6],
        "logprobs": [-1.0, -1.0],
        "versions": [{"version": "v0", "start": 0, "end": 2}],
    }
    sampling = {"min_tokens": 40, "max_tokens": 90, "presence_penalty": 1.0}
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        asked = body(group(1), sampling=sampling, continue_from={"samples": [resumed]})
        assert (await served.http.post("/v1/rollouts", json=asked)).status_code == 200
        tree = {"mode": "interval", "interval": 32, "max_leaves": 2, "first_split": 20}
        asked = body(group(1), sampling=sampling, branching=tree)
        assert (await served.http.post("/v1/rollouts", json=asked)).status_code == 200
    known = [
        (request.num_prior_tokens, request.sampling.min_tokens, request.sampling.max_tokens)
        for request in engine.submitted
    ]
    assert known == [(2, 38, 88), (0, 32, 32), (32, 8, 58), (32, 8, 58)]


async def test_stop_string_may_straddle_two_segments_of_a_tree(tmp_path: Path) -> None:
    tree = {"mode": "interval", "interval": 32, "max_leaves": 2, "first_split": 20}
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body(
            {"prompt": {"text": "p"}},
            sampling={"stop": ["\x1f\x20\x21\x22"], "max_tokens": 90},
            branching={**tree, "flatten": True},
        )
        answer = await served.http.post("/v1/rollouts", json=asked)
    [answered] = answer.json()["groups"]
    [root, *leaves] = answered["segments"]
    assert (root["finish_reason"], len(root["token_ids"])) == ("cut", 32)
    assert "stop_reason" not in root
    for leaf in leaves:
        assert (leaf["finish_reason"], leaf["token_ids"]) == ("stop", [0x21, 0x22])
        assert leaf["stop_reason"] == "\x1f\x20\x21\x22"
    for sample in answered["samples"]:
        assert sample["text"] == "".join(map(chr, range(1, 0x1F)))
        assert sample["stop_reason"] == "\x1f\x20\x21\x22"


async def test_parameter_that_the_engine_cannot_apply_is_refused_by_name(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.sampling_error = SamplingRefused("structured_outputs", "not a regex")
    async with serving(engine, tmp_path) as served:
        asked = body(group(1), sampling={"structured_outputs": {"regex": "("}})
        answer = await served.http.post("/v1/rollouts", json=asked)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "structured_outputs: not a regex" in answer.text
    assert not engine.submitted


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ChecksUnavailable("did not start"), 503, "overloaded"),
        (QueueFull("structured outputs", of_client=False), 503, "overloaded"),
        (QueueFull("structured outputs", of_client=True), 429, "quota_exceeded"),
    ],
)
async def test_request_that_could_not_be_checked_may_be_repeated(
    tmp_path: Path, error: EngineError, status: int, code: str
) -> None:
    engine = FakeEngine()
    engine.sampling_error = error
    async with serving(engine, tmp_path) as served:
        asked = body(group(1), sampling={"structured_outputs": {"regex": "a"}})
        answer = await served.http.post("/v1/rollouts", json=asked)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers["retry-after"]
    assert not engine.submitted
