"""Sampling controls of vLLM, SGLang and OpenAI, under all their names, as the engine gets them."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from engine.types.samples import Sampling, StructuredOutputs
from tests.compat.test_fields import placed
from tests.compat.third_party import Foreign, foreign

OPENAI = [("/v1/completions", None), ("/v1/chat/completions", None)]
PLACES: list[tuple[str, str | None]] = [
    *OPENAI,
    ("/inference/v1/generate", "sampling_params"),
    ("/generate", "sampling_params"),
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"min_p": 0.25}, {"min_p": 0.25}),
    ({"presence_penalty": 0.5, "frequency_penalty": -0.5}, {"presence_penalty": 0.5}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"logit_bias": {"7": -100, "8": 2.5}}, {"logit_bias": {7: -100.0, 8: 2.5}}),
    ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": (1, 2)}),
    ({"bad_words": ["a"]}, {"bad_words": ("a",)}),
    ({"min_tokens": 2}, {"min_tokens": 2}),
    ({"min_new_tokens": 2}, {"min_tokens": 2}),
    ({"stop": "x"}, {"stop": ("x",)}),
    ({"stop": ["x", "y"]}, {"stop": ("x", "y")}),
    ({"stop": ""}, {"stop": ()}),
    ({"stop": [], "min_p": None, "logit_bias": None}, {"stop": (), "min_p": 0.0}),
    ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
    ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
]
CONSTRAINTS: list[tuple[dict[str, Any], StructuredOutputs | None]] = [
    ({"structured_outputs": {"regex": "a+", "json": None}}, StructuredOutputs(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
    ({"structured_outputs": {"json_object": False}}, None),
    ({"structured_outputs": {}}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA},
            }
        },
        StructuredOutputs(json=json.dumps(SCHEMA)),
    ),
    ({"guided_json": SCHEMA}, StructuredOutputs(json=json.dumps(SCHEMA))),
    ({"guided_json": json.dumps(SCHEMA)}, StructuredOutputs(json=json.dumps(SCHEMA))),
    ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
    ({"guided_choice": ["a"]}, StructuredOutputs(choice=("a",))),
    ({"guided_grammar": "root ::= 'a'"}, StructuredOutputs(grammar="root ::= 'a'")),
    ({"json_schema": json.dumps(SCHEMA)}, StructuredOutputs(json=json.dumps(SCHEMA))),
    ({"json_schema": "$$ANY$$"}, StructuredOutputs(json_object=True)),
    ({"regex": "a+", "ebnf": "", "json_schema": ""}, StructuredOutputs(regex="a+")),
    ({"ebnf": "root ::= 'a'"}, StructuredOutputs(grammar="root ::= 'a'")),
    ({"structural_tag": "{}"}, StructuredOutputs(structural_tag="{}")),
]


async def engine_sampling(
    served: Foreign, path: str, inside: str | None, given: dict[str, Any]
) -> Sampling:
    served.engine.submitted.clear()
    await served.post(path, placed(path, inside, given))
    [sample] = served.engine.submitted
    return sample.sampling


async def test_controls_reach_the_engine_under_every_name(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        for path, inside in PLACES:
            for given, expected in SPELLINGS:
                sampling = await engine_sampling(served, path, inside, given)
                assert {name: getattr(sampling, name) for name in expected} == expected
            plain = await engine_sampling(served, path, inside, {})
            defaults = Sampling(max_tokens=4)
            assert all(getattr(plain, f.name) == getattr(defaults, f.name) for f in fields(plain))


async def test_constraints_reach_the_engine_under_every_name(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        for path, inside in PLACES:
            for given, expected in CONSTRAINTS:
                found = (await engine_sampling(served, path, inside, given)).structured_outputs
                assert (found and replace(found, enable_in_reasoning=True)) == expected, given
                assert found is None or found.enable_in_reasoning == ("chat" not in path), given


@pytest.mark.parametrize(
    ("given", "location"),
    [
        ({"regex": "a", "guided_json": {"type": "object"}}, "regex"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"no_such_kind": "a"}}, "structured_outputs.no_such_kind"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"min_tokens": 9}, ""),
        ({"stop": ["a"] * 65}, "stop"),
    ],
)
async def test_invalid_control_is_refused_before_sampling(
    tmp_path: Path, given: dict[str, Any], location: str
) -> None:
    async with foreign(tmp_path) as served:
        for path, inside in PLACES:
            _, problem = await served.refused(path, placed(path, inside, given))
            assert location in problem["errors"][0]["location"]
            assert served.engine.submitted == []
