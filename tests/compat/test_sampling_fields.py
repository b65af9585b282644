"""Every sampling field of vLLM on every route: it reaches the engine, or is refused with advice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.sampling_params import SamplingParams

from coppice.wire.sampling import Sampling
from engine.openai_server.sampling import CARRIED, REFUSED
from engine.types.samples import SampleRequest, StructuredOutputs
from tests.compat.third_party import Foreign, foreign
from tests.compat.wires import (
    ASKED,
    BODIES,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    PATHS,
    RESPONSES,
    message_of,
    sampled,
)
from tests.fake_engine import FakeEngine

VALUES: dict[str, Any] = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "temperature": 0.5,
    "watermarking": True,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "seed": 5,
    "stop": ["x"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "max_tokens": 5,
    "min_tokens": 2,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "prompt_logprob_token_ids": [[5]],
    "prompt_logprob_start": 1,
    "logprob_token_ids": [5],
    "flat_logprobs": True,
    "detokenize": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "output_kind": 1,
    "stream_interval": 2,
    "skip_clone": True,
    "output_text_buffer_length": 5,
    "structured_outputs": {"regex": "a+"},
    "logit_bias": {"7": 1.0},
    "allowed_token_ids": [1, 2],
    "extra_args": {"a": 1},
    "bad_words": ["a"],
    "skip_reading_prefix_cache": True,
    "thinking_token_budget": 5,
    "repetition_detection": {"max_pattern_size": 3, "min_count": 2},
    "routed_experts_prompt_start": 1,
    "trace_decode_token_ids": [5],
}
"""A value with an effect for each field of vLLM's SamplingParams."""


FIELDS = frozenset(VALUES)
MODELS = {
    CHAT: FIELDS & ChatCompletionRequest.model_fields.keys(),
    COMPLETIONS: FIELDS & CompletionRequest.model_fields.keys(),
    RESPONSES: FIELDS & ResponsesRequest.model_fields.keys(),
    MESSAGES: FIELDS & AnthropicMessagesRequest.model_fields.keys(),
    GENERATE: FIELDS,
}
"""Sampling fields of vLLM's models; vLLM ignores others."""
NEUTRAL = {
    *("flat_logprobs", "detokenize", "spaces_between_special_tokens", "output_kind"),
    *("stream_interval", "skip_clone", "output_text_buffer_length", "extra_args"),
    *("skip_reading_prefix_cache", "routed_experts_prompt_start"),
}
"""Fields that change no sample: they are of vLLM's output, or of its caches."""
OF_GROUPS = {"n", "seed", "max_tokens", "logprobs", "structured_outputs", "logit_bias"}
WITH_OTHERS: dict[tuple[str, str], dict[str, Any]] = {
    (CHAT, "logprobs"): {"logprobs": True, "top_logprobs": 2},
    (CHAT, "logprob_token_ids"): {"logprobs": True},
    (COMPLETIONS, "logprob_token_ids"): {"logprobs": 1},
}
"""Other values, and fields without which a field has no effect on a route."""
SCORED = {"prompt_logprobs"}
"""Fields with a request of their own to the engine."""
INTERNAL = ("kv_transfer_params", "ec_transfer_params", "vllm_xargs")
NATIVE = {"groups": [{"prompt": {"text": "abc"}}], "sampling": {"max_tokens": 4}}
BRANCHING = {"mode": "interval", "interval": 2, "max_leaves": 2}
NATIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "rollouts": ("/v1/rollouts", NATIVE),
    "trees": ("/v1/rollouts", {**NATIVE, "branching": BRANCHING}),
    "sessions": ("/v1/sessions", {"sampling": {"max_tokens": 4}}),
}


def nameless(requests: list[SampleRequest]) -> list[SampleRequest]:
    """Requests without what differs between requests: names, arrival rank, callbacks."""
    return [replace(each, id="", group="", priority=0, on_tokens=None) for each in requests]


async def submitted(served: Foreign, path: str, body: dict[str, Any]) -> list[SampleRequest]:
    served.engine.submitted.clear()
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 200, (body, answer.text)
    return nameless(served.engine.submitted)


def test_every_sampling_field_of_vllm_is_tried_and_decided() -> None:
    names = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert VALUES.keys() == names
    assert {*CARRIED, *REFUSED, *NEUTRAL, *OF_GROUPS, *SCORED} == names


@pytest.mark.parametrize("path", PATHS)
async def test_field_has_its_effect_or_is_refused(tmp_path: Path, path: str) -> None:
    served_fields = (*CARRIED, *OF_GROUPS)
    async with foreign(tmp_path) as served:
        for name, value in VALUES.items():
            body = {**sampled(path, **{name: value}), **WITH_OTHERS.get((path, name), {})}
            if name in REFUSED and name in MODELS[path]:
                answer = await served.http.post(path, json=body)
                assert answer.status_code == 400, name
                assert name in message_of(answer) and REFUSED[name] in message_of(answer), name
                continue
            plain = await submitted(served, path, BODIES[path])
            changed = await submitted(served, path, body) != plain
            assert changed == (name in served_fields and name in MODELS[path]), name


CONSTRAINTS: list[tuple[dict[str, Any], StructuredOutputs]] = [
    ({"regex": "a+"}, StructuredOutputs(regex="a+")),
    ({"choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
    ({"grammar": "root ::= 'a'"}, StructuredOutputs(grammar="root ::= 'a'")),
    ({"json_object": True}, StructuredOutputs(json_object=True)),
    ({"json": '{"type":"integer"}'}, StructuredOutputs(json='{"type":"integer"}')),
]


@pytest.mark.parametrize(("given", "expected"), CONSTRAINTS)
async def test_constraint_reaches_the_engine(
    tmp_path: Path, given: dict[str, Any], expected: StructuredOutputs
) -> None:
    async with foreign(tmp_path) as served:
        for path in (CHAT, COMPLETIONS, RESPONSES, GENERATE):
            [sample] = await submitted(served, path, sampled(path, structured_outputs=given))
            found = sample.sampling.structured_outputs
            assert found is not None and replace(found, enable_in_reasoning=True) == expected


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, {"use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
        (RESPONSES, {"background": True}, "background"),
        (GENERATE, {"features": {"mm_hashes": {}, "mm_placeholders": {}}}, "features"),
        (
            CHAT,
            {"structured_outputs": {"json": "{}", "disable_any_whitespace": True}},
            "structured",
        ),
        (CHAT, {"n": 1025}, "n"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        (COMPLETIONS, {"temperature": 3}, "temperature"),
        (COMPLETIONS, {"top_p": 0}, "top_p"),
        (COMPLETIONS, {"prompt": [300]}, "token ids must be below 256"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_request_that_cannot_be_served_is_refused_before_sampling(
    tmp_path: Path, path: str, fields: dict[str, Any], name: str, stream: bool
) -> None:
    async with foreign(tmp_path) as served:
        body = {**BODIES[path], **fields, "stream": stream}
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert name in message_of(answer)
        assert served.engine.submitted == []


@pytest.mark.parametrize("path", PATHS)
async def test_fields_of_the_engines_internals_are_dropped(tmp_path: Path, path: str) -> None:
    async with foreign(tmp_path) as served:
        plain = await submitted(served, path, BODIES[path])
        for name in INTERNAL:
            for body in (
                {**BODIES[path], name: {"coppice_handle": "x"}},
                sampled(path, **{name: {"coppice_handle": "x"}}),
                sampled(path, extra_args={name: {"coppice_handle": "x"}}),
            ):
                assert await submitted(served, path, body) == plain


@pytest.mark.parametrize("name", NATIVES)
async def test_field_of_the_native_routes_has_its_effect_or_is_refused(
    tmp_path: Path, name: str
) -> None:
    path, body = NATIVES[name]
    async with foreign(tmp_path) as served:
        plain = await submitted(served, path, body)
        for field, value in VALUES.items():
            given = {**body, "sampling": {**body["sampling"], field: value}}
            if field in Sampling.model_fields:
                found = await submitted(served, path, given)
                assert found != plain or path == "/v1/sessions", field
                continue
            status, problem = await served.refused(path, given)
            assert (status, problem["errors"][0]["location"]) == (422, f"sampling.{field}")


async def test_scoring_has_no_sampling_fields(tmp_path: Path) -> None:
    item = {"prompt": {"text": "a"}, "responses": [[5]]}
    async with foreign(tmp_path) as served:
        assert (await served.http.post("/v1/score", json={"items": [item]})).status_code == 200
        for name in VALUES.keys() - {"logprob_token_ids"}:
            status, problem = await served.refused(
                "/v1/score", {"items": [item], name: VALUES[name]}
            )
            assert (status, problem["errors"][0]["location"]) == (422, name)


async def test_completions_default_to_sixteen_tokens_and_others_to_the_context(
    tmp_path: Path,
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": [1, 2]},
        GENERATE: {"token_ids": [1, 2], "sampling_params": {}},
    }
    async with foreign(tmp_path, FakeEngine(max_context_tokens=64)) as served:
        limits = [
            (await submitted(served, path, body))[0].sampling.max_tokens
            for path, body in (*bodies.items(), (CHAT, {"messages": ASKED}))
        ]
    assert limits == [16, 62, 61]
