"""Requests to the Messages and Responses APIs that are large or hostile, and their fields."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.types.info import EngineInfo
from service.compat.anthropic import bodies as anthropic_bodies
from service.compat.openai import chat
from service.compat.responses import bodies as response_bodies
from service.compat.responses import items as response_items
from service.compat.unsupported_fields import INTERNAL_FIELDS, NEUTRAL, REFUSED, RESPONSES_REFUSED
from tests.compat.test_fields import nameless
from tests.compat.third_party import Foreign, foreign
from tests.fake_engine import FakeEngine

BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1},
    "/v1/responses": {"input": "abc", "max_output_tokens": 1},
}
SERVED = {
    "/v1/messages": anthropic_bodies.MessagesBody.model_fields.keys(),
    "/v1/responses": response_bodies.ResponsesBody.model_fields.keys(),
}
PATHS = sorted(BODIES)


async def error_of(served: Foreign, path: str, body: object) -> tuple[int, str]:
    answer = await served.http.post(path, json=body)
    return answer.status_code, answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_neutral_fields_change_nothing(tmp_path: Path, path: str) -> None:
    refused = RESPONSES_REFUSED if path == "/v1/responses" else {}
    neutral = dict.fromkeys(NEUTRAL.keys() - SERVED[path] - refused.keys() - INTERNAL_FIELDS, 1)
    values = {
        name: field.allowed_values[0]
        for name, field in {**REFUSED, **refused}.items()
        if field.allowed_values and name not in SERVED[path]
    }
    async with foreign(tmp_path) as served:
        await served.post(path, BODIES[path])
        await served.post(path, {**BODIES[path], **neutral, **values})
        plain, other = nameless(served.engine.submitted)
    assert plain == other


@pytest.mark.parametrize("path", PATHS)
async def test_refused_fields_are_named_with_advice(tmp_path: Path, path: str) -> None:
    own = RESPONSES_REFUSED if path == "/v1/responses" else {}
    refused = {n: f for n, f in {**REFUSED, **own}.items() if n not in SERVED[path]}
    async with foreign(tmp_path) as served:
        for name, field in refused.items():
            status, message = await error_of(served, path, {**BODIES[path], name: ["a", 0.5]})
            assert status == 400
            assert name in message and field.suggestion in message
        assert served.engine.submitted == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_supports_are_returned_on_request(tmp_path: Path, path: str, stream: bool) -> None:
    async with foreign(tmp_path) as served:
        native = {"groups": [{"prompt": {"text": "abc"}}], "sampling": {"max_tokens": 1}}
        rollout = await served.post("/v1/rollouts", {**native, "return_support": True})
        body = {**BODIES[path], "return_support": True, "stream": stream}
        answer = (await served.http.post(path, json=body)).text
        without = (await served.http.post(path, json={**body, "return_support": False})).text
    datas = [
        line.removeprefix("data: ") for line in answer.split("\n") if "weight_versions" in line
    ]
    found = json.loads(datas[-1])
    [sample] = rollout["groups"][0]["samples"]
    support = found.get("response", found)["support"]
    assert support.keys() == sample["support"].keys() and support["lengths"]
    assert '"support"' not in without


class PlainTemplateEngine(FakeEngine):
    """Its chat template has no variables."""

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, template_variables=frozenset())


@pytest.mark.parametrize("engine", [FakeEngine, PlainTemplateEngine])
async def test_reasoning_that_a_template_cannot_vary_is_counted(
    tmp_path: Path, engine: type[FakeEngine]
) -> None:
    fields: list[tuple[str, dict[str, Any]]] = [
        ("/v1/responses", {"reasoning": {"effort": "low"}}),
        ("/v1/messages", {"output_config": {"effort": "low"}}),
        ("/v1/messages", {"thinking": {"type": "disabled"}}),
    ]
    async with foreign(tmp_path, engine=engine()) as served:
        for path, field in fields:
            await served.post(path, {**BODIES[path], **field})
        assert served.ignored("unknown") == (3 if engine is PlainTemplateEngine else 0)


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _tool(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    name = "input_schema" if path == "/v1/messages" else "parameters"
    return {"type": "custom" if name == "input_schema" else "function", "name": "f", name: schema}


@pytest.mark.parametrize(
    "build",
    [
        lambda path: '{"messages":' + "[" * 100_000,
        lambda path: '{"input":' + "[" * 10_000 + "]" * 10_000 + "}",
        lambda path: json.dumps({**BODIES[path], "tools": [_tool(path, _deep(90))]}),
        lambda path: json.dumps({**BODIES[path], "tools": [_tool(path, {})] * 2000}),
        lambda path: json.dumps({**BODIES[path], "metadata": {"a": _deep(90)}}),
    ],
)
@pytest.mark.parametrize("path", PATHS)
async def test_deep_and_long_bodies_do_not_fail_the_server(
    tmp_path: Path, path: str, build: Callable[[str], str]
) -> None:
    async with foreign(tmp_path) as served:
        headers = {"content-type": "application/json"}
        answer = await served.http.post(path, content=build(path), headers=headers)
        assert answer.status_code in (200, 400)
        await served.post(path, BODIES[path])


@pytest.mark.parametrize("path", PATHS)
async def test_large_body_is_refused_in_the_format_of_the_api(tmp_path: Path, path: str) -> None:
    async with foreign(tmp_path, limits={"max_body_bytes": 1024}) as served:
        status, message = await error_of(served, path, {**BODIES[path], "user": "x" * 2000})
    assert status == 413
    assert "1024 bytes" in message


def watched(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[bool]:
    """Watch a function: for each call, whether it was made on the event loop."""
    on_loop: list[bool] = []
    function = getattr(module, name)

    def call(*arguments: Any, **options: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, call)
    return on_loop


@pytest.mark.parametrize("path", PATHS)
async def test_messages_are_converted_in_a_thread(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may have millions of characters in thousands of messages."""
    of_tools = watched(monkeypatch, response_items.ResponseTool, "model_dump")
    of_messages = watched(monkeypatch, anthropic_bodies, "chat_messages")
    of_input = watched(monkeypatch, response_bodies, "input_messages")
    async with foreign(tmp_path) as served:
        await served.post(path, {**BODIES[path], "tools": [_tool(path, {})]})
    assert of_messages + of_input == [False]
    assert not any(of_tools) and len(of_tools) == (path == "/v1/responses")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_chats_are_converted_in_a_thread(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_messages = watched(monkeypatch, chat.ChatMessage, "to_template_message")
    of_tools = watched(monkeypatch, chat.Tool, "model_dump")
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "abc"}]
    body = {"messages": messages, "tools": [function]}
    async with foreign(tmp_path) as served:
        fields = {} if path == "/tokenize" else {"tool_choice": "required", "max_tokens": 1}
        await served.post(path, {**body, **fields})
    assert of_messages == [False]
    assert of_tools and not any(of_tools)


@pytest.mark.parametrize("path", PATHS)
async def test_disconnected_client_ends_its_sample(tmp_path: Path, path: str) -> None:
    async with foreign(tmp_path) as served:
        served.engine.instant = False
        for stream in (False, True):
            body = {**BODIES[path], "stream": stream}
            request = asyncio.create_task(served.http.post(path, json=body))
            while not served.engine.running:
                await asyncio.sleep(0.001)
            request.cancel()
            while served.engine.running:
                await asyncio.sleep(0.001)


@pytest.mark.parametrize("path", PATHS)
async def test_response_that_is_not_parsed_is_text_and_counted(tmp_path: Path, path: str) -> None:
    async with foreign(tmp_path) as served:
        served.engine.parses = False
        answer = await served.post(path, {**BODIES[path], "tools": [_tool(path, {})]})
        value = served.server.metrics.registry.get_sample_value
        assert value("coppice_responses_not_parsed_total") == 1
    [block] = answer["content"] if path == "/v1/messages" else answer["output"][0]["content"]
    assert block["text"] == "\x04"


@pytest.mark.parametrize("path", PATHS)
async def test_headers_of_other_apis_are_accepted(tmp_path: Path, path: str) -> None:
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "fine-grained-tool-streaming-2025-05-14",
        "openai-beta": "responses=v1",
    }
    async with foreign(tmp_path) as served:
        await served.post(path, BODIES[path], headers=headers)
