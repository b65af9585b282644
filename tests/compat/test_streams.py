"""Streams of the OpenAI routes: usage, token IDs and errors, in the same places as vLLM."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from engine.types.chat import ChatRequest, ChatResponse
from tests.compat.third_party import Foreign, foreign
from tests.fake_engine import FakeEngine

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 2}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
PATHS = sorted(BODIES)


async def streamed(served: Foreign, path: str, **fields: Any) -> list[Any]:
    """The chunks of a stream that ends with [DONE]."""
    body = {**BODIES[path], **fields, "stream": True}
    answer = await served.http.post(path, json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("path", PATHS)
async def test_last_chunk_has_the_usage_of_the_plain_answer(tmp_path: Path, path: str) -> None:
    async with foreign(tmp_path) as served:
        plain = await served.post(path, {**BODIES[path], "n": 3})
        chunks = await streamed(served, path, n=3, stream_options={"include_usage": True})
    *samples, last = chunks
    ends = [chunk for chunk in samples if chunk["choices"][0]["finish_reason"]]
    assert len(ends) == len(plain["choices"])
    assert [chunk["usage"] for chunk in samples] == [None] * len(samples)
    assert (last["choices"], last["usage"]) == ([], plain["usage"])
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in samples} == {
        (last["id"], last["object"], last["model"])
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [{}, None, {"include_usage": False}])
async def test_usage_that_is_not_requested_is_not_sent(
    tmp_path: Path, path: str, options: object
) -> None:
    async with foreign(tmp_path) as served:
        chunks = await streamed(served, path, stream_options=options)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_continuous_usage_counts_the_prompt_and_sample_of_the_chunk(
    tmp_path: Path,
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with foreign(tmp_path) as served:
        chunks = await streamed(served, "/v1/completions", stream_options=options, n=2)
    used = {chunk["choices"][0]["index"]: chunk["usage"] for chunk in chunks[:-1]}
    for index, num_prompt_tokens in enumerate([3, 3, 2, 2]):
        assert used[index] == {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": 2,
            "total_tokens": num_prompt_tokens + 2,
        }
    assert chunks[-1]["usage"]["total_tokens"] == 5 + 8


@pytest.mark.parametrize("path", PATHS)
async def test_continuous_usage_needs_usage(tmp_path: Path, path: str) -> None:
    """As in vLLM."""
    async with foreign(tmp_path) as served:
        chunks = await streamed(served, path, stream_options={"continuous_usage_stats": True})
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("path", PATHS)
async def test_stream_options_require_a_stream(tmp_path: Path, path: str) -> None:
    async with foreign(tmp_path) as served:
        body = {**BODIES[path], "stream_options": {"include_usage": True}}
        status, problem = await served.refused(path, body)
        assert (status, problem["errors"][0]["location"]) == (400, "stream_options")
        assert served.engine.submitted == []


async def test_chat_sends_its_prompt_ids_in_the_first_chunk_of_each_choice(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        chunks = await streamed(served, "/v1/chat/completions", n=2, return_token_ids=True)
        without = await streamed(served, "/v1/chat/completions", n=2)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[97, 98, 99], None] * 2
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [None, [3, 4]] * 2
    assert all("prompt_token_ids" not in chunk for chunk in without)


async def test_completion_sends_its_prompt_ids_in_the_choice(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        chunks = await streamed(served, "/v1/completions", return_token_ids=True)
    choices = {chunk["choices"][0]["index"]: chunk["choices"][0] for chunk in chunks}
    assert [choices[i]["prompt_token_ids"] for i in (0, 1)] == [[5, 6, 7], [8, 9]]


class FailingEngine(FakeEngine):
    """Encoding its second sample fails."""

    def __init__(self) -> None:
        super().__init__()
        self.num_written = 0

    def reply(self, token_ids: Sequence[int], conversation: ChatRequest) -> ChatResponse:
        return ChatResponse(content=self.decode(token_ids))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_written += 1
        if self.num_written == 2:
            raise KeyError("secret")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("path", PATHS)
async def test_error_in_a_stream_is_an_event(tmp_path: Path, path: str) -> None:
    async with foreign(tmp_path, engine=FailingEngine()) as served:
        options = {"include_usage": True}
        *sent, error = await streamed(served, path, n=3, stream_options=options)
        value = served.server.metrics.registry.get_sample_value
        assert value("coppice_problems_total", {"problem": "internal"}) == 1
        assert value("coppice_samples_running") == 0
    assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in sent) == 1
    assert error.keys() == {"error"}
    assert error["error"]["message"] and "secret" not in error["error"]["message"]
    assert (error["error"]["type"], error["error"]["param"]) == ("internal", None)
    assert error["error"]["code"] == 500


@pytest.mark.parametrize("path", PATHS)
async def test_engine_death_in_a_stream_is_an_event(tmp_path: Path, path: str) -> None:
    async with foreign(tmp_path) as served:
        served.engine.instant = False
        request = served.http.build_request("POST", path, json={**BODIES[path], "stream": True})
        answer = await served.http.send(request, stream=True)
        served.engine.die()
        text = (await answer.aread()).decode()
    *_, error, done, _ = text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
    assert done == "data: [DONE]"


async def test_openai_client_counts_streamed_usage(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        messages: Any = CHAT["messages"]
        stream = await speaker.chat.completions.create(
            model="fake",
            messages=messages,
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        chunks = [chunk async for chunk in stream]
    used = chunks[-1].usage
    assert used is not None
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (3, 2, 5)
    assert chunks[0].usage is None
    assert (chunks[0].model_extra or {})["prompt_token_ids"] == [97, 98, 99]


async def test_openai_client_raises_an_error_of_a_stream(tmp_path: Path) -> None:
    async with foreign(tmp_path, engine=FailingEngine()) as served, client(served) as speaker:
        stream = await speaker.completions.create(
            model="fake", prompt=[1, 2], n=2, max_tokens=2, stream=True
        )
        with pytest.raises(openai.APIError) as raised:
            async for _ in stream:
                pass
    assert raised.value.type == "internal"


def client(served: Foreign) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
