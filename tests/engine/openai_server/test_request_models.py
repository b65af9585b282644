"""Validation of request bodies that are large or wrong."""

from typing import Any

import pytest
from pydantic import ValidationError
from vllm.exceptions import VLLMValidationError

from engine.openai_server.request_models import MAX_OBJECTS, MODELS, validated
from engine.protocol.openai_server import Api

USER = {"role": "user", "content": "a"}
CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
BODIES: dict[Api, dict[str, Any]] = {
    "chat/completions": {"messages": [USER]},
    "completions": {"prompt": [1, 2]},
    "responses": {"input": [USER, CALL]},
    "messages": {"model": "m", "max_tokens": 1, "messages": [USER]},
    "messages/count_tokens": {"model": "m", "messages": [USER]},
    "generate": {"token_ids": [1], "sampling_params": {"n": 2}},
    "tokenize": {"messages": [USER]},
    "detokenize": {"tokens": [1]},
}
LISTS: dict[Api, str] = {
    "chat/completions": "messages",
    "completions": "prompt",
    "responses": "input",
    "messages": "messages",
    "messages/count_tokens": "messages",
    "generate": "token_ids",
    "tokenize": "messages",
    "detokenize": "tokens",
}


def errors_of(api: Api, body: dict[str, Any]) -> int:
    with pytest.raises(ValidationError) as caught:
        validated(api, body)
    return caught.value.error_count()


@pytest.mark.parametrize("api", BODIES)
def test_large_body_is_read_as_a_small_one(api: Api) -> None:
    small = validated(api, dict(BODIES[api]))
    padding = {f"padding{number}": number for number in range(200)}
    large = validated(api, {**BODIES[api], **padding})
    assert type(large) is type(small)
    random = {"request_id", "id"}
    assert small.model_dump(exclude=random | padding.keys()) == large.model_dump(
        exclude=random | padding.keys()
    )


@pytest.mark.parametrize("api", BODIES)
def test_errors_of_small_bodies_are_those_of_vllm(api: Api) -> None:
    body = {**BODIES[api], LISTS[api]: ["wrong", [0.5], {}]}
    with pytest.raises(ValidationError) as caught:
        MODELS[api].validate_python(dict(body), from_attributes=True)
    assert errors_of(api, body) == caught.value.error_count()


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("wrong", [0.5, "", {}, {"role": 1}, [], None])
def test_errors_of_large_bodies_are_few(api: Api, wrong: object) -> None:
    items: list[object] = [wrong] * 10_000
    body = {**BODIES[api], LISTS[api]: [items] if api == "completions" else items}
    assert errors_of(api, body) < 300


@pytest.mark.parametrize("api", BODIES)
def test_number_of_objects_is_limited(api: Api) -> None:
    objects = [{"type": "function"}] * MAX_OBJECTS
    for body in (
        {**BODIES[api], LISTS[api]: objects},
        {**BODIES[api], "tools": [{"parameters": [objects]}]},
    ):
        with pytest.raises(VLLMValidationError, match="JSON objects"):
            validated(api, body)
