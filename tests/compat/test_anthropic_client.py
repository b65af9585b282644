"""Anthropic's own released client against a server on a socket."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from engine.types.chat import ChatResponse, ToolCall
from tests.compat.test_tool_turns import ParsingEngine
from tests.compat.third_party import Foreign, foreign
from tests.engine.chats import CONTEXT_TOKENS, TemplateChat, make_chat
from tests.fake_engine import FakeEngine
from tests.service.keyfile import write_keys

PATH = "/v1/messages"
TOOL: Any = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
ASKED: Any = [{"role": "user", "content": "abc"}]
BODY: dict[str, Any] = {"model": "fake", "messages": ASKED, "max_tokens": 2}
REASONED = ChatResponse(
    content="hello",
    reasoning="why",
    tool_calls=(
        ToolCall(id="call-1", name="add", arguments='{"a": 1}'),
        ToolCall(id="call-2", name="add", arguments='{"a": 2}'),
    ),
)


class AnsweringEngine(FakeEngine):
    """A fake engine whose samples all have one parsed response."""

    def __init__(self, response: ChatResponse) -> None:
        super().__init__()
        self.response = response

    def chat_response(self, *_: Any, **__: Any) -> ChatResponse:
        return self.response


def client(served: Foreign, key: str = "none") -> AsyncAnthropic:
    return AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0)


async def test_message(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        answer = await speaker.messages.create(**BODY)
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "fake")
    [block] = answer.content
    assert block.type == "text" and block.text == "\x03\x04"
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, 2)
    assert answer.model_extra is not None
    assert answer.model_extra["weight_versions"] == [{"version": "v0", "start": 0, "end": 2}]
    assert "token_ids" not in answer.model_extra


async def test_system_and_parts_are_rendered(tmp_path: Path) -> None:
    parts: Any = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    async with foreign(tmp_path) as served, client(served) as speaker:
        systems: list[Any] = ["s", [{"type": "text", "text": "s"}]]
        for system in systems:
            await speaker.messages.create(
                model="fake",
                system=system,
                messages=[{"role": "user", "content": parts}],
                max_tokens=1,
            )
        prompts = [bytes(sample.prompt_token_ids) for sample in served.engine.submitted]
    assert prompts == [b"sabc", b"sabc"]


async def test_token_ids_are_returned_on_request(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        answer = await served.post(PATH, {**BODY, "return_token_ids": True})
    assert (answer["prompt_token_ids"], answer["token_ids"]) == ([97, 98, 99], [3, 4])


async def test_reasoning_and_parallel_tool_calls(tmp_path: Path) -> None:
    engine = AnsweringEngine(REASONED)
    engine.finish = "stop"
    async with foreign(tmp_path, engine=engine) as served, client(served) as speaker:
        answer = await speaker.messages.create(**BODY, tools=[TOOL])
        choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
        one = await speaker.messages.create(**BODY, tools=[TOOL], tool_choice=choice)
    thinking, text, first, second = answer.content
    assert thinking.type == "thinking" and thinking.thinking == "why" and thinking.signature
    assert text.type == "text" and text.text == "hello"
    assert first.type == second.type == "tool_use"
    assert [(use.id, use.name, use.input) for use in (first, second)] == [
        ("call-1", "add", {"a": 1}),
        ("call-2", "add", {"a": 2}),
    ]
    assert answer.stop_reason == "tool_use"
    assert [block.type for block in one.content] == ["thinking", "text", "tool_use"]


async def test_streamed_message_is_the_whole_message(tmp_path: Path) -> None:
    engine = AnsweringEngine(REASONED)
    engine.finish = "stop"
    async with foreign(tmp_path, engine=engine) as served, client(served) as speaker:
        whole = await speaker.messages.create(**BODY, tools=[TOOL])
        async with speaker.messages.stream(**BODY, tools=[TOOL]) as stream:
            events = [event.type async for event in stream]
            streamed = await stream.get_final_message()
    volatile = {"id", "content", "parsed_output", "weight_versions"}
    assert streamed.model_dump(exclude=volatile) == whole.model_dump(exclude=volatile)
    assert [_plain(block) for block in streamed.content] == [_plain(b) for b in whole.content]
    assert events[0] == "message_start" and events[-2:] == ["message_delta", "message_stop"]
    assert events.count("content_block_start") == events.count("content_block_stop") == 4


def _plain(block: Any) -> dict[str, Any]:
    return dict(block.model_dump(exclude={"signature", "parsed_output"}))


async def test_text_is_streamed_token_by_token(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        served.engine.instant = False
        async with speaker.messages.stream(**{**BODY, "max_tokens": 3}) as stream:
            texts = []
            async for event in stream:
                if event.type == "message_start":
                    assert event.message.usage.input_tokens == 3
                    served.engine.step(2)
                if event.type == "text":
                    texts.append(event.text)
                    served.engine.step(1)
            final = await stream.get_final_message()
    assert texts == ["\x03\x04", "\x05"]
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 3)


async def test_empty_message_has_an_empty_text_block(tmp_path: Path) -> None:
    engine = AnsweringEngine(ChatResponse(content=None))
    async with foreign(tmp_path, engine=engine) as served, client(served) as speaker:
        whole = await speaker.messages.create(**BODY, tools=[TOOL])
        async with speaker.messages.stream(**BODY, tools=[TOOL]) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert list(map(_plain, message.content)) == [
            {"type": "text", "text": "", "citations": None}
        ]


@pytest.mark.parametrize(
    "arguments",
    [
        "{",
        "[1]",
        "",
        "9" * 5000,
        r'{"a": "\ud83d"}',
        '{"a": NaN}',
        '{"a": -1e999}',
        '{"a": ' + "[" * 260 + "]" * 260 + "}",
        '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
)
async def test_arguments_that_are_no_object_are_passed_as_text(
    tmp_path: Path, arguments: str
) -> None:
    call = ToolCall(id="call-1", name="add", arguments=arguments)
    engine = AnsweringEngine(ChatResponse(content=None, tool_calls=(call,)))
    async with foreign(tmp_path, engine=engine) as served, client(served) as speaker:
        whole = await speaker.messages.create(**BODY, tools=[TOOL])
        async with speaker.messages.stream(**BODY, tools=[TOOL]) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        [use] = map(_plain, message.content)
        assert (use["type"], use["input"]) == ("tool_use", {"INVALID_JSON": arguments})


async def test_stop_sequence_ends_the_message(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        answer = await speaker.messages.create(**BODY, stop_sequences=["\x04"])
        [sample] = served.engine.submitted
    assert sample.sampling.stop == ("\x04",)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "\x04")
    [block] = answer.content
    assert block.type == "text" and block.text == "\x03"


async def test_tokens_are_counted_as_they_are_rendered(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        counted = await speaker.messages.count_tokens(
            model="fake", messages=ASKED, system="s", tools=[TOOL]
        )
        await speaker.messages.create(**BODY, system="s", tools=[TOOL])
        [sample] = served.engine.submitted
    assert counted.input_tokens == len(sample.prompt_token_ids) == 7


@pytest.mark.parametrize("repeats", [2, 50])
async def test_tokens_beyond_the_context_are_counted(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, repeats: int
) -> None:
    """A client counts them to know when a conversation must be shortened."""
    chat = make_chat(tmp_path_factory.mktemp("chat"))
    text = "".join(f"{i} + {i} " for i in range(100 * repeats))
    turns = [{"role": "user", "content": text}]
    async with foreign(tmp_path, engine=ParsingEngine(chat)) as served:
        counted = await served.post(f"{PATH}/count_tokens", {"messages": turns})
        refused = await served.http.post(PATH, json={**BODY, "messages": turns})
    assert counted["input_tokens"] >= len(chat.tokenizer.encode(text)) > CONTEXT_TOKENS
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("choice", "kind"),
    [({"type": "any"}, "array"), ({"type": "tool", "name": "add"}, "object")],
)
async def test_forced_calls_are_constrained(tmp_path: Path, choice: Any, kind: str) -> None:
    async with foreign(tmp_path) as served:
        await served.post(PATH, {**BODY, "tools": [TOOL], "tool_choice": choice})
        parallel = {**choice, "disable_parallel_tool_use": True}
        await served.post(PATH, {**BODY, "tools": [TOOL], "tool_choice": parallel})
        constraints = [sample.sampling.structured_outputs for sample in served.engine.submitted]
    schemas = [json.loads(found.json) for found in constraints if found and found.json]
    assert [schema["type"] for schema in schemas] == [kind, kind]
    assert ("maxItems" in schemas[1]) == (kind == "array")


async def test_output_format_is_a_constraint(tmp_path: Path) -> None:
    output: Any = {"format": {"type": "json_schema", "schema": {"type": "integer"}}}
    async with foreign(tmp_path) as served, client(served) as speaker:
        await speaker.messages.create(**BODY, output_config=output)
        [sample] = served.engine.submitted
    constraint = sample.sampling.structured_outputs
    assert constraint is not None and json.loads(constraint.json or "") == {"type": "integer"}


async def test_tool_loop_of_three_turns(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The thinking, text and calls of each answer are in the prompt of the next turn."""
    chat: TemplateChat = make_chat(
        tmp_path_factory.mktemp("chat"), tool_parser="hermes", reasoning_parser="qwen3"
    )
    turns = list(ASKED)
    async with foreign(tmp_path, engine=ParsingEngine(chat)) as served, client(served) as speaker:
        for stream in (False, True, False):
            answer = await _answer(speaker, turns, stream=stream)
            thinking, call = answer.content
            assert (thinking.thinking, call.input) == ("I add", {"a": 1})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
            turns += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result]},
            ]
        prompt = chat.tokenizer.decode(served.engine.submitted[-1].prompt_token_ids)
    assert prompt.count('<think>I add</think> add({"a": 1})') == 2
    assert prompt.count("tool: 3") == 2


async def _answer(speaker: AsyncAnthropic, turns: Any, *, stream: bool) -> Any:
    fields: Any = {"model": "fake", "messages": turns, "max_tokens": 2, "tools": [TOOL]}
    if not stream:
        return await speaker.messages.create(**fields)
    async with speaker.messages.stream(**fields) as running:
        return await running.get_final_message()


async def test_errors_are_those_of_anthropics_client(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secrets = write_keys(file, trainer="rollout", operator="admin")
    async with foreign(tmp_path, server={"keys_file": file}) as served:
        async with client(served, secrets["trainer"]) as speaker:
            await speaker.messages.create(**BODY)
            with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
                await speaker.messages.create(**{**BODY, "max_tokens": 0})
            assert caught.value.type == "invalid_request_error"
            with pytest.raises(anthropic.NotFoundError, match="this server serves"):
                await speaker.messages.create(**{**BODY, "model": "claude"})
        async with client(served, "wrong") as speaker:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await speaker.messages.create(**BODY)
            assert refused.value.type == "authentication_error"
        async with client(served, secrets["operator"]) as speaker:
            with pytest.raises(anthropic.PermissionDeniedError):
                await speaker.messages.create(**BODY)


async def test_one_credential_is_required(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secret = write_keys(file, trainer="rollout")["trainer"]
    bearer, named = {"authorization": f"Bearer {secret}"}, {"x-api-key": secret}
    async with foreign(tmp_path, server={"keys_file": file}) as served:

        async def status(headers: Any, path: str = PATH) -> int:
            return (await served.http.post(path, json=BODY, headers=headers)).status_code

        assert [await status(bearer), await status(named)] == [200, 200]
        assert await status({**bearer, **named}) == 401
        assert await status([("x-api-key", secret), ("x-api-key", secret)]) == 401
        assert await status({"x-api-key": ""}) == 401
        assert await status(named, "/v1/chat/completions") == 401


async def test_failures_have_anthropics_status(tmp_path: Path) -> None:
    early = {**BODY, "weights": {"min_version": "v9"}}
    async with foreign(tmp_path) as served:
        answer = await served.http.post(PATH, json=early)
        body = answer.json()
        assert (answer.status_code, body["type"]) == (529, "error")
        assert answer.headers["content-type"] == "application/json"
        assert (body["error"]["type"], body["error"]["code"]) == (
            "overloaded_error",
            "version_unavailable",
        )
        assert body["request_id"]
        served.engine.die()
        gone = await served.http.post(PATH, json=BODY)
    assert (gone.status_code, gone.json()["error"]["type"]) == (529, "overloaded_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_aborted_sample_is_an_error(tmp_path: Path, stream: bool) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        served.engine.finish = "abort"
        with pytest.raises(anthropic.APIStatusError, match="aborted"):
            if stream:
                async with speaker.messages.stream(**BODY) as running:
                    await running.get_final_message()
            else:
                await speaker.messages.create(**BODY)


async def test_failed_stream_is_reported(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        served.engine.instant = False
        with pytest.raises(anthropic.APIStatusError, match="engine"):
            async with speaker.messages.stream(**BODY) as stream:
                served.engine.die()
                await stream.get_final_message()


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}
USE = {"type": "tool_use", "id": "a", "name": "add", "input": {}}


@pytest.mark.parametrize(
    ("fields", "location"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages"),
        ({"messages": [*ASKED, {"role": "assistant", "content": [USE]}]}, "messages"),
        ({"messages": [*ASKED, {"role": "assistant", "content": ""}]}, "messages"),
        ({"system": [IMAGE]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"name": "add"}]}, "tools"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"n": 2}, "n"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
async def test_unsupported_content_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], location: str
) -> None:
    async with foreign(tmp_path) as served:
        answer = await served.http.post(PATH, json={**BODY, **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert location in error["message"]
        assert served.engine.submitted == []


@pytest.mark.parametrize(
    "build",
    [
        lambda: '{"messages":' + "[" * 10_000 + "]" * 10_000 + "}",
        lambda: '{"messages":' + "[" * 100_000,
        lambda: json.dumps({**BODY, "tools": [{**TOOL, "input_schema": _deep(150)}]}),
    ],
)
async def test_deep_json_is_refused(tmp_path: Path, build: Callable[[], str]) -> None:
    async with foreign(tmp_path) as served:
        content = build()
        headers = {"content-type": "application/json"}
        answer = await served.http.post(PATH, content=content, headers=headers)
        assert answer.status_code in (200, 400)
        assert (await served.http.post(PATH, json=BODY)).status_code == 200


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema
