"""`tool_choice: required` and named functions: the constraint, and the calls in the answer."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.types.chat import ChatResponse
from service.compat.chat import samples as chat_samples
from service.compat.chat.forced_tools import ToolChoice, forced_response
from service.compat.openai.chat import ChatMessage
from tests.compat.third_party import foreign
from tests.fake_engine import FakeEngine

PATH = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "add"}}
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}


class WritingEngine(FakeEngine):
    """Every response has the same text."""

    text = ""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.text


async def answered(tmp_path: Path, text: str, **given: Any) -> tuple[Any, Any]:
    """The choice of an answer, and the JSON schema that the engine got."""
    engine = WritingEngine()
    engine.text, engine.finish = text, "stop"
    async with foreign(tmp_path, engine=engine) as served:
        answer = await served.http.post(PATH, json={**BODY, "tools": [ADD, NOW], **given})
        assert answer.status_code == 200, answer.text
        [sample] = engine.submitted
    constraint = sample.sampling.structured_outputs
    assert constraint is not None and constraint.json is not None
    if not given.get("stream"):
        return answer.json()["choices"][0], json.loads(constraint.json)
    *_, last, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    choice = json.loads(last.removeprefix("data: "))["choices"][0]
    return {**choice, "message": choice["delta"]}, json.loads(constraint.json)


@pytest.mark.parametrize("stream", [False, True])
async def test_required_calls_are_a_list_of_the_given_tools(tmp_path: Path, stream: bool) -> None:
    text = '[{"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}]'
    choice, schema = await answered(tmp_path, text, tool_choice="required", stream=stream)
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("add", {"a": 1}),
        ("now", {}),
    ]
    assert choice["finish_reason"] == "tool_calls"
    names = [call["properties"]["name"]["enum"] for call in schema["items"]["anyOf"]]
    assert (schema["minItems"], names) == (1, [["add"], ["now"]])
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == PARAMETERS


async def test_named_function_gets_its_arguments(tmp_path: Path) -> None:
    choice, schema = await answered(tmp_path, '{"a": 1}', tool_choice=NAMED)
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert (choice["finish_reason"], schema) == ("stop", PARAMETERS)


async def test_call_that_was_cut_short_is_content(tmp_path: Path) -> None:
    for choice in ("required", NAMED):
        found, _ = await answered(tmp_path, '[{"name": "add", "para', tool_choice=choice)
        assert found["message"]["content"] == '[{"name": "add", "para'
        assert "tool_calls" not in found["message"]


@pytest.mark.parametrize("value", ["1" * 4301, "[" * 200_000 + "]" * 200_000])
async def test_call_that_python_cannot_parse_is_content(tmp_path: Path, value: str) -> None:
    arguments = f'{{"a": {value}}}'
    listed = f'[{{"name": "add", "parameters": {arguments}}}]'
    for choice, text in (("required", listed), (NAMED, arguments)):
        found, _ = await answered(tmp_path, text, tool_choice=choice)
        assert found["message"]["content"] == text


async def test_calls_are_parsed_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[str]()

    def response(choice: ToolChoice | None, text: str) -> ChatResponse:
        threads.append(threading.current_thread().name)
        return forced_response(choice, text)

    monkeypatch.setattr(chat_samples, "forced_response", response)
    await answered(tmp_path, '{"a": 1}', tool_choice=NAMED)
    assert len(threads) == 1 and threads[0] != threading.main_thread().name


@pytest.mark.parametrize(
    "given",
    [
        {"tool_choice": "required"},
        {"tool_choice": NAMED, "tools": [NOW]},
        {"tool_choice": "sometimes", "tools": [ADD]},
    ],
)
async def test_choice_without_its_tool_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    async with foreign(tmp_path) as served:
        status, problem = await served.refused(PATH, {**BODY, **given})
        assert (status, served.engine.submitted) == (400, [])
    assert problem["errors"][0]["location"].startswith("tool_choice")


async def test_forced_call_cannot_have_another_constraint(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        body = {**BODY, "tools": [ADD], "tool_choice": "required", "regex": "a"}
        _, problem = await served.refused(PATH, body)
    assert problem["errors"] == [
        {"location": "regex", "message": "cannot be combined with tool_choice"}
    ]


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}


@pytest.mark.parametrize("parallel", [True, False])
async def test_forced_call_has_no_text_to_format(tmp_path: Path, parallel: bool) -> None:
    _, schema = await answered(
        tmp_path,
        "[]",
        tool_choice="required",
        response_format=FORMAT,
        parallel_tool_calls=parallel,
    )
    assert schema["type"] == "array"
    assert ("maxItems" in schema) == (not parallel)


@pytest.mark.parametrize("choice", ["auto", NAMED])
async def test_messages_are_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: object
) -> None:
    convert, converted = ChatMessage.to_template_message, list[object]()

    def counted(message: ChatMessage) -> dict[str, Any]:
        converted.append(message)
        return convert(message)

    monkeypatch.setattr(ChatMessage, "to_template_message", counted)
    async with foreign(tmp_path) as served:
        await served.post(PATH, {**BODY, "tools": [ADD], "tool_choice": choice})
    assert len(converted) == 1
