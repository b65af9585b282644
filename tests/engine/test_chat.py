"""Tool conversations of several turns, and responses parsed by vLLM's own parsers."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from vllm.tool_parsers import ToolParser, ToolParserManager

from engine.errors import ConversationRefused, RequestRefused
from engine.requests.chat_template_kwargs import template_options
from engine.types.chat import ChatRequest, ChatResponse
from tests.engine.chats import TemplateChat, make_chat

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 2"},
    {"role": "assistant", "content": "", "reasoning_content": "add", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call-1", "content": "3"},
]
SECOND = ChatRequest(messages=TURNS, tools=[TOOL])
WRITTEN = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
PARSERS: list[dict[str, str]] = [
    {"tool_parser": "hermes", "reasoning_parser": "qwen3"},
    {"tool_parser": "hermes"},
    {"reasoning_parser": "qwen3"},
    {},
]


@pytest.fixture(scope="module", params=PARSERS, ids=lambda given: "-".join(given) or "none")
def any_chat(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TemplateChat]:
    yield make_chat(tmp_path_factory.mktemp("chat"), **request.param)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemplateChat]:
    yield make_chat(tmp_path_factory.mktemp("chat"), **PARSERS[0])


def test_second_tool_turn_is_rendered_and_parsed(any_chat: TemplateChat) -> None:
    conversation = copy.deepcopy(SECOND)
    first = any_chat.chat.encode(conversation)
    assert any_chat.tokenizer.decode(first) == (
        'tool add\nuser: 1 + 2assistant: <think>add</think> add({"a": 1, "b": 2})tool: 3'
    )
    replies = [any_chat.chat_response("it is 3", conversation) for _ in range(2)]
    assert [chat_response.parsed for chat_response in replies] == [True, True]
    assert conversation == SECOND, "rendering and parsing leave a conversation as it is"
    assert any_chat.chat.encode(conversation) == first


def test_second_turn_calls_tools_in_parallel(chat: TemplateChat) -> None:
    chat.chat.encode(SECOND)
    chat_response = chat.chat_response(f"<think>once more</think>{WRITTEN}\n{WRITTEN}", SECOND)
    assert chat_response.reasoning == "once more"
    assert [json.loads(call.arguments) for call in chat_response.tool_calls] == [{"a": 3}, {"a": 3}]


def test_parallel_calls_and_null_contents_are_rendered(chat: TemplateChat) -> None:
    turns = [
        TURNS[0],
        {"role": "assistant", "content": None, "tool_calls": [CALL, {**CALL, "id": "call-2"}]},
        {"role": "tool", "tool_call_id": "call-1", "content": [{"type": "text", "text": "3"}]},
        {"role": "tool", "tool_call_id": "call-2", "content": "4"},
    ]
    text = chat.render(turns, [TOOL])
    assert text.count('add({"a": 1, "b": 2})') == 2
    assert text.endswith("tool: 3tool: 4")


def test_arguments_that_are_not_json_do_not_end_a_conversation(chat: TemplateChat) -> None:
    """Passed as the model wrote them; vLLM renders an empty object."""
    cut = {**CALL, "function": {"name": "add", "arguments": '{"a": '}}
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [cut]}]
    conversation = ChatRequest(messages=turns, tools=[TOOL])
    assert "add({})" in chat.tokenizer.decode(chat.chat.encode(conversation))
    answer = ChatResponse(content=None, reasoning="3")
    assert chat.chat_response("3", conversation) == answer


@pytest.mark.parametrize(
    "call",
    [
        {**CALL, "function": {"name": "add", "arguments": {"a": 1}}},
        {**CALL, "function": {"arguments": "{}"}},
        {"id": "call-1", "type": "function"},
        {"function": None},
    ],
)
def test_call_that_the_parsers_would_reject_is_refused_first(
    chat: TemplateChat, call: dict[str, Any]
) -> None:
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(ConversationRefused, match=r"function\.arguments") as refused:
        chat.encode(turns, [TOOL])
    assert refused.value.field == "messages"


def test_long_arguments_are_refused_before_they_are_parsed(chat: TemplateChat) -> None:
    long = {**CALL, "function": {"name": "add", "arguments": f"[{'[],' * 2**19}0]"}}
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [CALL, long]}]
    with pytest.raises(ConversationRefused, match="the limit is 1048576 characters"):
        chat.encode(turns, [TOOL])


def test_deep_values_are_rendered_or_refused(chat: TemplateChat) -> None:
    """JSON is accepted up to 200 levels; strings of JSON may hold more."""
    deep: dict[str, Any] = {}
    for _ in range(190):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "add", "parameters": deep}}
    assert chat.encode(TURNS, [tool]) == chat.encode(TURNS, [TOOL])
    assert template_options({"a": deep}, frozenset("a")) == {"a": deep}
    nested = {**CALL, "function": {"name": "add", "arguments": "[" * 2**19}}
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [nested]}]
    with pytest.raises(RequestRefused, match="failed to render"):
        chat.encode(turns, [TOOL])


def test_calls_of_other_types_and_roles_are_no_failures(chat: TemplateChat) -> None:
    custom = {"id": "call-1", "type": "custom", "custom": {"name": "add", "input": "1"}}
    turns = [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [custom]}]
    with pytest.raises(RequestRefused):
        chat.encode(turns, [TOOL])
    for call in (custom, {"function": None}, {}):
        assert chat.encode([{**TURNS[0], "tool_calls": [call]}]) == chat.encode(TURNS[:1])


def test_tools_that_the_parsers_would_reject_are_refused_first(chat: TemplateChat) -> None:
    with pytest.raises(ConversationRefused) as refused:
        chat.encode(TURNS[:1], [{"type": "function", "function": {"name": 7}}])
    assert refused.value.field == "tools"


def test_without_tools_a_call_is_text(chat: TemplateChat) -> None:
    chat_response = chat.chat_response(f"<think>hm</think>{WRITTEN}", replace(SECOND, tools=()))
    assert (chat_response.content, chat_response.tool_calls) == (WRITTEN, ())


def test_lone_surrogates_of_a_call_are_replaced(chat: TemplateChat) -> None:
    written = r'<tool_call>{"name": "a\ud83d", "arguments": {"a": "\ud83d", "b": "\ud83d\ude00"}}'
    [call] = chat.chat_response(f"{written}</tool_call>", SECOND).tool_calls
    assert (call.name, json.loads(call.arguments)) == (
        "a\ufffd",
        {"a": "\ufffd", "b": "\U0001f600"},
    )


class FailingToolParser(ToolParser):  # type: ignore[misc]
    def extract_tool_calls(self, *_: Any, **__: Any) -> Any:
        raise KeyError("secret text")


def test_response_that_fails_to_parse_is_all_content(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    ToolParserManager.register_module("failing", module=FailingToolParser)
    failing = make_chat(tmp_path_factory.mktemp("failing"), tool_parser="failing")
    assert failing.chat_response(WRITTEN, SECOND) == ChatResponse(content=WRITTEN, parsed=False)
    assert "KeyError" in caplog.text
    assert "secret" not in caplog.text, "responses are in no log"
