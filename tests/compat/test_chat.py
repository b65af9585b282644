"""Chats on the OpenAI route: template options, tool turns, responses that do not parse."""

from pathlib import Path
from typing import Any

from tests.compat.third_party import foreign

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
PATH = "/v1/chat/completions"


async def test_options_unknown_to_the_template_are_counted(tmp_path: Path) -> None:
    options = {"enable_thinking": False, "thinking": True, "padding": False}
    async with foreign(tmp_path) as served:
        await served.post(PATH, {**CHAT, "chat_template_kwargs": options})
        assert served.ignored("unknown") == 2


async def test_argument_of_the_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        body = {**CHAT, "chat_template_kwargs": {"max_length": 3}}
        status, problem = await served.refused(PATH, body)
        assert (status, problem["code"]) == (400, "invalid_request")
        [fault] = problem["errors"]
        assert fault["location"] == "chat_template_kwargs"
        assert "max_length" in fault["message"]
        assert served.engine.submitted == []


async def test_response_that_is_not_parsed_is_text_and_counted(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    async with foreign(tmp_path) as served:
        served.engine.parses = False
        answer = await served.post(PATH, {**CHAT, "tools": [tool], "n": 2})
        value = served.server.metrics.registry.get_sample_value
        assert value("coppice_responses_not_parsed_total") == 2
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["\x06\x07"] * 2
