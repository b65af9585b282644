"""Anthropic's own released client against a server on a socket."""

from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.compat.third_party import Foreign, foreign
from tests.service.keyfile import write_keys

PATH = "/v1/messages"
TOOL: Any = {"name": "add", "description": "adds", "input_schema": {"type": "object"}}
ASKED: Any = [{"role": "user", "content": "abc"}]
BODY: dict[str, Any] = {"model": "fake", "messages": ASKED, "max_tokens": 2}


def client(served: Foreign, key: str = "none") -> AsyncAnthropic:
    return AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0)


async def test_message(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        answer = await speaker.messages.create(**BODY, extra_body={"return_weight_versions": True})
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "fake")
    [block] = answer.content
    assert block.type == "text" and block.text == "\x03\x04"
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, 2)
    assert answer.model_extra is not None
    assert answer.model_extra["weight_versions"] == [{"version": "v0", "start": 0, "end": 2}]


async def test_streamed_message_is_the_whole_message(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        served.engine.finish = "stop"
        each: list[Any] = [{}, {"tools": [TOOL]}]
        for fields in each:
            whole = await speaker.messages.create(**BODY, **fields)
            async with speaker.messages.stream(**BODY, **fields) as stream:
                events = [event.type async for event in stream]
                streamed = await stream.get_final_message()
            assert streamed.stop_reason == whole.stop_reason
            assert streamed.usage.output_tokens == whole.usage.output_tokens
            assert [_plain(block) for block in streamed.content] == list(map(_plain, whole.content))
            assert events[0] == "message_start"
            assert events[-2:] == ["message_delta", "message_stop"]
        assert whole.content[-1].type == "tool_use"


def _plain(block: Any) -> dict[str, Any]:
    return dict(block.model_dump(exclude={"id", "citations", "parsed_output", "signature"}))


async def test_tool_loop(tmp_path: Path) -> None:
    """The result of a call is in the prompt of the next turn."""
    turns = list(ASKED)
    async with foreign(tmp_path) as served, client(served) as speaker:
        served.engine.finish = "stop"
        for _ in range(2):
            fields: Any = {"model": "fake", "messages": turns, "max_tokens": 2, "tools": [TOOL]}
            answer = await speaker.messages.create(**fields)
            call: Any = answer.content[-1]
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "result"}
            turns += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result]},
            ]
        assert bytes(served.engine.submitted[-1].prompt_token_ids).endswith(b"result")


async def test_tokens_are_counted_as_they_are_rendered(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        counted = await speaker.messages.count_tokens(
            model="fake", messages=ASKED, system="s", tools=[TOOL]
        )
        await speaker.messages.create(**BODY, system="s", tools=[TOOL])
        [sample] = served.engine.submitted
    assert counted.input_tokens == len(sample.prompt_token_ids) == 7


async def test_errors_are_those_of_anthropics_client(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secrets = write_keys(file, trainer="rollout", operator="admin")
    async with foreign(tmp_path, server={"keys_file": file}) as served:
        async with client(served, secrets["trainer"]) as speaker:
            await speaker.messages.create(**BODY)
            with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
                await speaker.messages.create(**{**BODY, "max_tokens": 0})
            assert caught.value.status_code == 400
            with pytest.raises(anthropic.NotFoundError, match="does not exist"):
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


async def test_failed_stream_is_reported(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        served.engine.instant = False
        with pytest.raises(anthropic.APIStatusError):
            async with speaker.messages.stream(**BODY) as stream:
                served.engine.die()
                await stream.get_final_message()
