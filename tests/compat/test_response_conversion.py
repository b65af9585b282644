"""Chat messages of requests of the Responses API, compared with those of vLLM's converter.

Differences that every comparison allows for: a message without text has the content "", and several
parts of a message are one string, as on the other chat routes.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import (
    construct_input_messages,
    construct_tool_dicts,
    should_continue_final_message,
)

from service.compat.responses.bodies import ResponsesBody

pytestmark = pytest.mark.slow

USER = {"role": "user", "content": "a"}
OUT = {"type": "output_text", "text": "b", "annotations": []}
ANSWER = {
    "type": "message",
    "role": "assistant",
    "content": [OUT],
    "id": "m",
    "status": "completed",
}
WHY = {
    "type": "reasoning",
    "id": "r",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "why"}],
}
SUMMARY = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "so"}]}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
CUSTOM = {"type": "custom_tool_call", "call_id": "c2", "name": "shell", "input": "ls é"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "3"}
CUSTOM_RESULT = {"type": "custom_tool_call_output", "call_id": "c2", "output": "4"}
PART = {"type": "input_text", "text": "a"}
INPUTS: dict[str, Any] = {
    "text": "a",
    "message": [USER],
    "typed message": [{"type": "message", **USER}],
    "parts": [{"role": "user", "content": [PART, PART]}],
    "roles": [{"role": "developer", "content": "d"}, {"role": "system", "content": "s"}, USER],
    "turns": [USER, {"role": "assistant", "content": "b"}, USER],
    "output message": [USER, ANSWER, USER],
    "call": [USER, CALL, RESULT],
    "whole turn": [USER, WHY, ANSWER, CALL, CUSTOM, RESULT, CUSTOM_RESULT],
    "call before the text": [USER, CALL, ANSWER, RESULT],
    "reasoning twice": [USER, WHY, WHY, ANSWER, USER],
    "summary": [USER, SUMMARY, CALL, RESULT],
    "output in parts": [USER, CALL, {**RESULT, "output": [PART, PART]}],
    "two turns of tools": [USER, WHY, CALL, RESULT, WHY, CALL, RESULT],
    "unfinished": [USER, {**ANSWER, "status": "incomplete"}],
}


def body(given: object, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": given, **fields}


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    kept = {k: v for k, v in message.items() if v is not None and k != "type"}
    return {**kept, "content": content}


@pytest.mark.parametrize("instructions", [None, "s"])
@pytest.mark.parametrize("name", INPUTS)
def test_messages_are_those_of_vllm(name: str, instructions: str | None) -> None:
    given = body(INPUTS[name], instructions=instructions)
    request = ResponsesRequest.model_validate(body(INPUTS[name], instructions=instructions))
    expected = construct_input_messages(
        request_instructions=request.instructions, request_input=request.input
    )
    ours = ResponsesBody.model_validate(given).chat_request(())
    assert list(map(plain, ours.messages)) == list(map(plain, expected))
    assert ours.continue_final_message == should_continue_final_message(request.input)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True},
        {"type": "function", "name": "add", "parameters": None, "strict": None},
        {"type": "function", "name": "add", "description": "d", "parameters": {}, "strict": False},
        {"type": "custom", "name": "shell", "description": "d"},
        {"type": "custom", "name": "shell", "format": {"type": "text"}},
    ],
)
def test_tools_are_those_of_vllm(tool: dict[str, Any]) -> None:
    ours = ResponsesBody.model_validate(body("a", tools=[tool])).chat_request(()).tools
    request = ResponsesRequest.model_validate(body("a", tools=[tool]))
    expected = construct_tool_dicts(request.tools, request.tool_choice) or []
    for found in expected:
        found["function"] = {k: v for k, v in found["function"].items() if v is not None}
    assert [dict(found) for found in ours] == expected


@pytest.mark.parametrize("effort", ["none", "low", None])
def test_reasoning_effort_is_that_of_vllm(effort: str | None) -> None:
    given = body("a", reasoning={"effort": effort})
    ours = ResponsesBody.model_validate(given).chat_request(()).template_options
    params = ResponsesRequest.model_validate(given).build_chat_params(None, "auto")
    names = ("reasoning_effort", "enable_thinking")
    theirs = {name: params.chat_template_kwargs.get(name) for name in names}
    assert ours == {name: value for name, value in theirs.items() if value is not None}


def test_stored_messages_keep_system_messages_of_the_input() -> None:
    """vLLM drops all system messages of a stored conversation, and its reasoning and calls."""
    previous = [{"role": "system", "content": "s"}, USER]
    request = ResponsesBody.model_validate(body("b", instructions="t"))
    roles = [message["role"] for message in request.chat_request(previous).messages]
    assert roles == ["system", "system", "user", "user"]
