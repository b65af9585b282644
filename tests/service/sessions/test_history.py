"""Conversations that agents send back, matched to the calls that returned their messages."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from engine.types.chat import ChatRequest
from service.rollouts.trees.segment import Segment
from service.rollouts.trees.token_tree import TokenTree
from service.sessions.history import MAX_PARSED_CHARS, Conversations, Match, RecordedCall
from service.sessions.prompts import chat_prompt

ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1 + 2"},
]
ANSWER: dict[str, Any] = {
    "role": "assistant",
    "content": "3\n",
    "tool_calls": [
        {
            "id": "a",
            "type": "function",
            "function": {"name": "add", "arguments": '{"x": 1, "y": 2}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "3"}
TOOL = {"type": "function", "function": {"name": "add"}}


def recorded(name: str = "0") -> RecordedCall:
    return RecordedCall(segment=Segment(id=name, token_ids=np.arange(3, dtype=np.int32)))


def chat(*messages: Mapping[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest(messages=[*ASKED, *messages], **fields)


def match_of(*messages: Mapping[str, Any], **fields: Any) -> Match | None:
    conversations = Conversations()
    conversations.record(chat(tools=[TOOL]), ANSWER, recorded())
    return conversations.match(chat(*messages, **{"tools": [TOOL], **fields}))


def called(**changes: Any) -> dict[str, Any]:
    call = {**ANSWER["tool_calls"][0]}
    function = {**call["function"], **changes.pop("function", {})}
    return {**ANSWER, "tool_calls": [{**call, "function": function, **changes}]}


@pytest.mark.parametrize(
    "sent_back",
    [
        ANSWER,
        {**ANSWER, "content": "  3"},
        {**ANSWER, "content": [{"type": "text", "text": "3"}]},
        {**ANSWER, "reasoning": "adding", "refusal": None},
        called(function={"arguments": '{"y":2.0,"x":1}'}),
        called(id="toolu_1"),
    ],
)
def test_returned_message_is_found_however_a_client_formats_it(sent_back: dict[str, Any]) -> None:
    result = {**RESULT, "tool_call_id": sent_back["tool_calls"][0]["id"]}
    found = match_of(sent_back, result)
    assert found is not None
    assert (found.index, found.has_foreign, found.call.segment.id) == (2, False, "0")


@pytest.mark.parametrize(
    "sent_back",
    [
        {**ANSWER, "content": "4"},
        {"role": "assistant", "content": "3"},
        called(function={"arguments": '{"x": 1}'}),
        called(function={"name": "sub"}),
        {"role": "user", "content": "3"},
    ],
)
def test_edited_message_is_not_found(sent_back: dict[str, Any]) -> None:
    assert match_of(sent_back, RESULT) is None


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"template_options": {"enable_thinking": False}}]
)
def test_other_tools_or_template_options_do_not_match(fields: dict[str, Any]) -> None:
    assert match_of(ANSWER, **fields) is None


@pytest.mark.parametrize("text", ["1 + 2 ", "1 + 3", ""])
def test_other_messages_must_be_the_same(text: str) -> None:
    conversations = Conversations()
    conversations.record(chat(), ANSWER, recorded())
    edited = ChatRequest(messages=[ASKED[0], {"role": "user", "content": text}, ANSWER])
    assert conversations.match(edited) is None


def test_deepest_returned_message_is_found_with_the_earlier_ones() -> None:
    conversations = Conversations()
    last = {"role": "assistant", "content": "It is 3."}
    conversations.record(chat(), ANSWER, recorded("0"))
    conversations.record(chat(ANSWER, RESULT), last, recorded("1"))
    foreign = {"role": "assistant", "content": "No."}
    found = conversations.match(chat(ANSWER, RESULT, last, ASKED[1], foreign, ASKED[1]))
    assert found is not None and found.has_foreign
    assert {at: call.segment.id for at, call in found.earlier.items()} == {2: "0", 4: "1"}
    assert (found.index, found.call) == (4, found.earlier[4])


def test_calls_with_equal_messages_are_told_apart_by_their_tool_call_ids() -> None:
    conversations = Conversations()
    for name in ("a", "b", "c"):
        conversations.record(chat(), called(id=name), recorded(name))
    for name, expected in {"a": "a", "b": "b", "other": "c"}.items():
        found = conversations.match(chat(called(id=name)))
        assert found is not None and found.call.segment.id == expected


def test_conversation_is_matched_while_its_message_is_recorded() -> None:
    class Matching(dict[str, Any]):
        """A message that is matched whenever one of its fields is read."""

        def get(self, key: str, default: Any = None) -> Any:
            conversations.match(chat(ANSWER))
            return super().get(key, default)

    conversations = Conversations()
    for name in ("a", "b"):
        conversations.record(chat(), Matching(ANSWER), recorded(name))
    found = conversations.match(chat(ANSWER))
    assert found is not None and found.call.segment.id == "b"


def test_swapped_results_of_parallel_calls_do_not_match_later_turns() -> None:
    conversations = Conversations()
    parallel = {**ANSWER, "tool_calls": [*ANSWER["tool_calls"], *called(id="b")["tool_calls"]]}
    results = [{**RESULT, "tool_call_id": name} for name in ("a", "b")]
    last = {"role": "assistant", "content": "done"}
    conversations.record(chat(parallel, *results), last, recorded())
    assert conversations.match(chat(parallel, *results, last)) is not None
    assert conversations.match(chat(parallel, *reversed(results), last)) is None


@pytest.mark.parametrize(
    "arguments", ["", "[" * 100_000, '{"a": 1e999}', "\ud800", '{"a":', "null"]
)
def test_any_arguments_are_found_again(arguments: str) -> None:
    conversations = Conversations()
    message = called(function={"arguments": arguments})
    conversations.record(chat(), message, recorded())
    assert conversations.match(chat(message)) is not None


def test_text_that_begins_with_recorded_text_is_found_with_its_rest() -> None:
    conversations = Conversations()
    conversations.record_text("abc", recorded("0"))
    conversations.record_text("ab", recorded("1"))
    conversations.record_text("abcd\ud800", recorded("2"))
    found = conversations.match_text("abcx")
    assert found is not None and (found.call.segment.id, found.rest) == ("0", "x")
    shorter = conversations.match_text("abx")
    assert shorter is not None and (shorter.call.segment.id, shorter.rest) == ("1", "x")
    longest = conversations.match_text("abcd\ud800")
    assert longest is not None and (longest.call.segment.id, longest.rest) == ("2", "")
    assert conversations.match_text("bc") is None


@pytest.mark.parametrize("spaces", ["", " "])
def test_long_arguments_are_compared_as_text(spaces: str) -> None:
    text = "x" * MAX_PARSED_CHARS
    conversations = Conversations()
    sent = called(function={"arguments": f'{{"x": "{text}"}}'})
    conversations.record(chat(), sent, recorded())
    sent_back = called(function={"arguments": f'{{"x":{spaces} "{text}"}}'})
    assert (conversations.match(chat(sent_back)) is None) == bool(spaces)


class MeasuringThreads:
    """Runs work at once; `sizes` are those that count toward the limits of waiting work."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def run(self, kind: str, num_bytes: int, function: Callable[[], Any]) -> Any:
        self.sizes.append(num_bytes)
        return function()


class ConstantTokenizer:
    async def rendered(self, chat_request: ChatRequest) -> list[int]:
        return [1]


@pytest.mark.parametrize(
    "changes", [{"tools": [{"name": "x" * 1000}]}, {"template_options": {"a": "x" * 1000}}]
)
async def test_all_texts_of_a_conversation_count_toward_the_queue(changes: dict[str, Any]) -> None:
    threads: Any = MeasuringThreads()
    tokenizer: Any = ConstantTokenizer()
    await chat_prompt(tokenizer, threads, TokenTree("s"), Conversations(), chat(**changes))
    assert threads.sizes[0] > 1000
