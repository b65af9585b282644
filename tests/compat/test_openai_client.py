"""OpenAI's own released client against a server on a socket."""

from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.compat.third_party import Foreign, foreign
from tests.fake_engine import FakeEngine
from tests.service.keyfile import write_keys

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}
ASKED: Any = [{"role": "user", "content": "abc"}]


def client(served: Foreign, key: str = "none") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


async def test_completions(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        [model] = (await speaker.models.list()).data
        answer = await speaker.completions.create(
            model=model.id, prompt="ab", n=2, max_tokens=3, logprobs=0, seed=7
        )
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.choices[0].text == "\x02\x03\x04"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [-0.5] * 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 6)


async def test_chat(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        answer = await speaker.chat.completions.create(
            model="fake", messages=ASKED, max_completion_tokens=2, logprobs=True
        )
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "\x03\x04")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == ["\x03", "\x04"]
    assert [entry.bytes for entry in choice.logprobs.content] == [[3], [4]]


async def test_image_is_refused_by_a_text_model(tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages: Any = [{"role": "user", "content": [part]}]
    async with foreign(tmp_path) as served, client(served) as speaker:
        with pytest.raises(openai.BadRequestError, match="not a multimodal model"):
            await speaker.chat.completions.create(model="fake", messages=messages)


async def test_tools(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        served.engine.finish = "stop"
        answer = await speaker.chat.completions.create(
            model="fake", messages=ASKED, tools=[TOOL], max_tokens=2
        )
        call: Any = (answer.choices[0].message.tool_calls or [])[0]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert (call.function.name, call.function.arguments) == ("add", "{}")
        turns = [
            *ASKED,
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "46"},
        ]
        silent = await speaker.chat.completions.create(
            model="fake", messages=turns, tools=[TOOL], tool_choice="none", max_tokens=2
        )
    assert not silent.choices[0].message.tool_calls


async def test_tool_without_a_name_is_refused(tmp_path: Path) -> None:
    tools: list[Any] = [{"type": "function", "function": {}}, {}]
    async with foreign(tmp_path) as served, client(served) as speaker:
        for tool in tools:
            with pytest.raises(openai.BadRequestError, match="function"):
                await speaker.chat.completions.create(model="fake", messages=ASKED, tools=[tool])


async def test_streams(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        chat = await speaker.chat.completions.create(
            model="fake", messages=ASKED, tools=[TOOL], max_tokens=2, stream=True
        )
        chunks = [chunk async for chunk in chat]
        plain = await speaker.completions.create(
            model="fake", prompt=[1, 2], max_tokens=2, stream=True
        )
        texts = [chunk.choices[0].text async for chunk in plain]
    assert chunks[0].choices[0].delta.role == "assistant"
    [call] = chunks[1].choices[0].delta.tool_calls or []
    assert call.index == 0 and call.function is not None and call.function.name == "add"
    assert texts == ["\x02\x03"]


async def test_problems_are_errors_of_the_openai_client(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secret = write_keys(file, trainer="rollout")["trainer"]
    async with foreign(tmp_path, server={"keys_file": file}) as served:
        async with client(served, secret) as speaker:
            with pytest.raises(openai.BadRequestError, match="suffix"):
                await speaker.completions.create(model="fake", prompt="a", suffix="b")
            with pytest.raises(openai.NotFoundError, match="does not exist") as unknown:
                await speaker.completions.create(model="gpt", prompt="a")
            assert unknown.value.param == "model"
        async with client(served, "wrong") as speaker:
            with pytest.raises(openai.AuthenticationError):
                await speaker.models.list()


async def test_failed_stream_is_reported(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        served.engine.instant = False
        stream = await speaker.completions.create(model="fake", prompt="a", stream=True)
        served.engine.die()
        with pytest.raises(openai.APIError, match="engine"):
            async for _ in stream:
                pass


async def test_invalid_request_is_a_400_with_its_parameter(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        wrong: list[tuple[dict[str, Any], str | None]] = [
            ({"prompt": "a", "temperature": 3}, "temperature"),
            ({"prompt": "a", "n": 5000}, "n"),
            ({"prompt": "a" * 600}, "input_text"),
        ]
        for fields, name in wrong:
            with pytest.raises(openai.BadRequestError) as caught:
                await speaker.completions.create(model="fake", **fields)
            assert caught.value.param == name
        native, _ = await served.refused("/v1/rollouts", {"groups": []})
    assert native == 422


async def test_chat_is_accumulated(tmp_path: Path) -> None:
    """With the client's own accumulator of deltas."""
    engine = FakeEngine()
    engine.finish = "stop"
    async with (
        foreign(tmp_path, engine=engine) as served,
        client(served) as speaker,
        speaker.chat.completions.stream(
            model="fake", messages=ASKED, max_tokens=6, logprobs=True
        ) as stream,
    ):
        await stream.until_done()
        final = await stream.get_final_completion()
    [choice] = final.choices
    assert (choice.message.content, choice.finish_reason) == ("\x03\x04\x05\x06\x07", "stop")
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5] * 6


async def test_extra_fields_are_read_and_usage_is_counted(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        stream = await speaker.chat.completions.create(
            model="fake",
            messages=ASKED,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True, "return_weight_versions": True},
        )
        chunks = [chunk async for chunk in stream]
    used, last = chunks[-1].usage, chunks[-2].choices[0]
    assert used is not None
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (3, 2, 5)
    assert (chunks[0].model_extra or {})["prompt_token_ids"] == [97, 98, 99]
    spans = [{"version": "v0", "start": 0, "end": 2}]
    assert (last.model_extra or {})["weight_versions"] == spans
