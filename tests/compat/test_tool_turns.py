"""Tool conversations over HTTP, with vLLM's own renderer and parsers before a fake model."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.types.chat import ChatRequest, ChatResponse
from engine.types.info import EngineInfo
from tests.compat.third_party import Foreign, foreign
from tests.engine.chats import CONTEXT_TOKENS, TemplateChat, make_chat
from tests.fake_engine import FakeEngine

PATH = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "1 + 2"}]
WRITTEN = '<think>I add</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class ParsingEngine(FakeEngine):
    """Renders and parses as a real engine does; every sample is `response`."""

    def __init__(self, chat: TemplateChat) -> None:
        super().__init__(max_context_tokens=CONTEXT_TOKENS)
        self.chat = chat
        self.response = chat.tokenizer.encode(WRITTEN)

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, vocab_size=len(self.chat.tokenizer))

    def encode_chat(self, conversation: ChatRequest) -> list[int]:
        return self.chat.chat.encode(conversation)

    def chat_response(
        self, token_ids: Sequence[int], chat_request: ChatRequest, **_: Any
    ) -> ChatResponse:
        return self.chat.chat.chat_response(self.response, chat_request)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> TemplateChat:
    directory = tmp_path_factory.mktemp("chat")
    return make_chat(directory, tool_parser="hermes", reasoning_parser="qwen3")


async def message_of(served: Foreign, body: dict[str, Any]) -> Any:
    if not body["stream"]:
        return (await served.post(PATH, body))["choices"][0]["message"]
    answer = await served.http.post(PATH, json=body)
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    role, message = [json.loads(event)["choices"][0]["delta"] for event in events[:2]]
    return role | message


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_to_a_tool_turn_is_valid_in_the_next_turn(
    tmp_path: Path, chat: TemplateChat, stream: bool
) -> None:
    turns = list(ASKED)
    async with foreign(tmp_path, engine=ParsingEngine(chat)) as served:
        for num_calls in range(1, 4):
            body = {"messages": turns, "tools": [TOOL], "max_tokens": 2, "n": 2, "stream": stream}
            message = await message_of(served, body)
            assert message["reasoning_content"] == "I add"
            [call] = message["tool_calls"]
            turns += [message, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
            assert len(served.engine.submitted) == 2 * num_calls
        prompt = chat.tokenizer.decode(served.engine.submitted[-1].prompt_token_ids)
    assert prompt.count('<think>I add</think> add({"a": 1})tool: 3') == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_call_without_arguments_is_refused_before_sampling(
    tmp_path: Path, chat: TemplateChat, stream: bool
) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "add"}}
    turns = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
    async with foreign(tmp_path, engine=ParsingEngine(chat)) as served:
        body = {"messages": turns, "tools": [TOOL], "stream": stream}
        status, problem = await served.refused(PATH, body)
        assert (status, problem["errors"][0]["location"]) == (400, "messages")
        assert served.engine.submitted == []
