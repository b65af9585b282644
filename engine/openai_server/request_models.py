"""vLLM's models of request bodies, whose validation takes a bounded time and memory.

A wrong item of a request to the Responses API has up to 234 errors, and a valid one takes 0.2 ms,
while which the event loop waits for the GIL: 20,000 wrong items took 12 s and 6 GB.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest
from vllm.exceptions import VLLMValidationError

from engine.protocol.openai_server import Api

MODELS: Mapping[Api, TypeAdapter[Any]] = {
    "chat/completions": TypeAdapter(ChatCompletionRequest),
    "completions": TypeAdapter(CompletionRequest),
    "responses": TypeAdapter(ResponsesRequest),
    "messages": TypeAdapter(AnthropicMessagesRequest),
    "messages/count_tokens": TypeAdapter(AnthropicCountTokensRequest),
    "generate": TypeAdapter(GenerateRequest),
    "tokenize": TypeAdapter(TokenizeRequest),
    "detokenize": TypeAdapter(DetokenizeRequest),
}
MAX_OBJECTS = 2**14
"""Maximum number of JSON objects in a body, such as messages, their parts and tools."""
MAX_VALUES_OF_ALL_ERRORS = 100
"""Values of the largest body whose errors are all reported, as vLLM does. For a larger body, those
of the first wrong item of each list are reported."""


def validated(api: Api, body: dict[str, Any]) -> Any:
    """The request of a body, as FastAPI reads it; raises pydantic's or vLLM's ValidationError."""
    num_objects, num_values = _size(body)
    if num_objects > MAX_OBJECTS:
        raise VLLMValidationError(f"the body has more than {MAX_OBJECTS} JSON objects")
    if num_values <= MAX_VALUES_OF_ALL_ERRORS:
        return MODELS[api].validate_python(body, from_attributes=True)
    return _FAIL_FAST[api].validate_python(body, from_attributes=True)


def _size(body: dict[str, Any]) -> tuple[int, int]:
    """Numbers of objects and of values.

    A list that begins with a text or a number is wrong if it has objects, too.
    """
    num_objects = num_values = 0
    pending: list[Any] = [body]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            num_objects += 1
            num_values += len(value)
            pending += value.values()
        elif isinstance(value, list):
            num_values += len(value)
            if value and isinstance(value[0], dict | list):
                pending += value
    return num_objects, num_values


def _fail_fast(schema: Any) -> Any:
    """A core schema whose lists fail at their first wrong item."""
    if isinstance(schema, dict):
        changed = {name: _fail_fast(value) for name, value in schema.items()}
        return changed | {"fail_fast": True} if changed.get("type") == "list" else changed
    if isinstance(schema, list | tuple):
        return type(schema)(map(_fail_fast, schema))
    return schema


_FAIL_FAST: Mapping[Api, SchemaValidator] = {
    api: SchemaValidator(_fail_fast(model.core_schema), _use_prebuilt=False)
    for api, model in MODELS.items()
}
