"""Token-by-token streams of the OpenAI, vLLM and SGLang routes, and OpenAI's client as a reader."""

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensStreamResponse

from engine.protocol.text import DEFAULT_SAMPLING
from engine.types.chat import ChatRequest, ChatResponse, ToolCall, ToolCallPart
from engine.types.samples import Sampling
from service.compat import event_stream
from service.compat.anthropic import stream as anthropic_stream
from service.compat.responses import events as response_events
from service.compat.sglang import generate as sglang_generate
from tests.compat.test_agent_apis import watched
from tests.compat.third_party import Foreign, foreign
from tests.fake_engine import FakeEngine, FakeStream

MESSAGES: Any = [{"role": "user", "content": "abc"}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 6}
COMPLETION: dict[str, Any] = {"prompt": list(range(64)), "max_tokens": 6}
TEXT = "@ABCDE"
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def events_of(answer: httpx.Response) -> AsyncIterator[Any]:
    """The values of a stream that ends with [DONE]."""
    buffer = b""
    async for content in answer.aiter_bytes():
        *events, buffer = (buffer + content).split(b"\n\n")
        for event in events:
            assert event.startswith(b"data: ") and b"\n" not in event
            if event == b"data: [DONE]":
                return
            yield json.loads(event.removeprefix(b"data: "))
    raise AssertionError("the stream ended without [DONE]")


@asynccontextmanager
async def streaming(
    served: Foreign, path: str, body: dict[str, Any], num_samples: int = 1
) -> AsyncIterator[AsyncIterator[Any]]:
    """The events of a request whose samples run in the engine."""
    async with served.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async with asyncio.timeout(30):
            while len(served.engine.running) < num_samples:
                await asyncio.sleep(0.001)
        yield events_of(answer)


@asynccontextmanager
async def stepping(engine: FakeEngine) -> AsyncIterator[None]:
    """Samples a token of each running sample in every iteration of the event loop."""

    async def step() -> None:
        while True:
            engine.step(1)
            await asyncio.sleep(0.001)

    task = asyncio.create_task(step())
    try:
        yield
    finally:
        task.cancel()


async def test_completion_is_sent_token_by_token(tmp_path: Path) -> None:
    async with foreign(tmp_path, engine=FakeEngine(instant=False)) as served:
        body = {**COMPLETION, "return_token_ids": True, "logprobs": 1}
        async with streaming(served, "/v1/completions", body) as events:
            for step, text in enumerate("@A"):
                served.engine.step(1)
                chunk = await anext(events)
                [choice] = chunk["choices"]
                assert chunk["object"] == "text_completion" and "usage" not in chunk
                assert choice.pop("prompt_token_ids", None) == (None if step else list(range(64)))
                assert choice == {
                    "index": 0,
                    "text": text,
                    "logprobs": {
                        "tokens": [text],
                        "token_logprobs": [-0.5],
                        "top_logprobs": [{text: -0.5}],
                        "text_offset": [step],
                    },
                    "finish_reason": None,
                    "stop_reason": None,
                    "token_ids": [64 + step],
                }
            served.engine.step(10)
            [last] = [event async for event in events]
    [choice] = last["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("BCDE", "length")
    assert choice["weight_versions"] == [{"version": "v0", "start": 0, "end": 6}]
    assert choice["logprobs"]["text_offset"] == [2, 3, 4, 5]


async def test_chat_begins_with_its_role_and_ends_with_its_finish_reason(tmp_path: Path) -> None:
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, "/v1/chat/completions", CHAT) as events,
    ):
        served.engine.step(1)
        first, second = await anext(events), await anext(events)
        served.engine.step(5)
        [last] = [event async for event in events]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert second["choices"][0]["delta"] == {"content": "\x03"}
    assert last["choices"][0]["delta"] == {"content": "\x04\x05\x06\x07\x08"}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in (first, second, last)]
    assert reasons == [None, None, "length"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_continuous_usage_grows_with_the_tokens(tmp_path: Path, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = COMPLETION if path == "/v1/completions" else CHAT
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, path, {**body, "stream_options": options}) as events,
        stepping(served.engine),
    ):
        chunks = [event async for event in events]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-2:] == [6, 6]
    assert len(chunks) > 3 and chunks[-1]["choices"] == []


async def test_parts_of_several_samples_are_the_answer_without_a_stream(tmp_path: Path) -> None:
    body = {"prompt": [[5, 6, 7], [8, 9]], "n": 3, "max_tokens": 7, "logprobs": 2}
    async with foreign(tmp_path) as served:
        plain = await served.post("/v1/completions", body)
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, "/v1/completions", body, 6) as events,
        stepping(served.engine),
    ):
        chunks = [event["choices"][0] async for event in events]
    assert len(chunks) > 6
    for expected in plain["choices"]:
        parts = [chunk for chunk in chunks if chunk["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == expected["finish_reason"]
        assert parts[-1]["weight_versions"] == expected["weight_versions"]
        for name, values in expected["logprobs"].items():
            assert [v for part in parts for v in part["logprobs"][name]] == values


async def test_slow_client_receives_longer_parts(tmp_path: Path) -> None:
    """Its request holds no queue of parts."""
    async with foreign(tmp_path, engine=FakeEngine(instant=False)) as served:
        body = {**COMPLETION, "max_tokens": 400}
        async with streaming(served, "/v1/completions", body) as events:
            for _ in range(300):
                served.engine.step(1)
            assert len((await anext(events))["choices"][0]["text"]) == 300
            served.engine.step(100)
            assert [len(event["choices"][0]["text"]) async for event in events] == [100]


async def test_closed_stream_aborts_its_samples(tmp_path: Path) -> None:
    async with foreign(tmp_path, engine=FakeEngine(instant=False)) as served:
        async with streaming(served, "/v1/completions", {**COMPLETION, "max_tokens": 99}) as events:
            served.engine.step(1)
            await anext(events)
        async with asyncio.timeout(30):
            while served.engine.running:
                await asyncio.sleep(0.001)


class ReasoningEngine(FakeEngine):
    """Responses whose first three tokens are reasoning; tools are called by every response."""

    def response_stream(
        self,
        sampling: Sampling = DEFAULT_SAMPLING,
        prompt: Sequence[int] = (),
        chat_request: ChatRequest | None = None,
    ) -> "ReasoningStream":
        return ReasoningStream(self, is_parsed=True)

    def chat_response(
        self, token_ids: Sequence[int], chat_request: ChatRequest, **_: Any
    ) -> ChatResponse:
        calls = (ToolCall(id="1", name="add", arguments="{}"),) if chat_request.tools else ()
        return ChatResponse(
            reasoning=self.decode(token_ids[:3]) or None,
            content=self.decode(token_ids[3:]) or None,
            tool_calls=calls,
        )


class ReasoningStream(FakeStream):
    num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> ChatResponse:
        start = type(self).num_tokens
        type(self).num_tokens += len(token_ids)
        is_reasoning = [start + i < 3 for i in range(len(token_ids))]
        reasoning = [token for token, r in zip(token_ids, is_reasoning, strict=True) if r]
        content = [token for token, r in zip(token_ids, is_reasoning, strict=True) if not r]
        return ChatResponse(
            reasoning=self.engine.decode(reasoning) or None,
            content=self.engine.decode(content) or None,
        )


async def test_reasoning_is_streamed_apart_from_content(tmp_path: Path) -> None:
    ReasoningStream.num_tokens = 0
    async with (
        foreign(tmp_path, engine=ReasoningEngine(instant=False)) as served,
        streaming(served, "/v1/chat/completions", CHAT) as events,
        stepping(served.engine),
    ):
        deltas = [event["choices"][0]["delta"] async for event in events]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "\x03\x04\x05"
    assert "".join(delta.get("content", "") for delta in deltas) == "\x06\x07\x08"
    assert len(deltas) > 3


async def test_tool_calls_are_sent_when_they_can_be_parsed(tmp_path: Path) -> None:
    """With token ids, the client sees the tokens before."""
    async with foreign(tmp_path, engine=ReasoningEngine(instant=False)) as served:
        served.engine.finish = "stop"
        body = {**CHAT, "tools": [TOOL], "return_token_ids": True}
        async with (
            streaming(served, "/v1/chat/completions", body) as events,
            stepping(served.engine),
        ):
            _, *parts, last = [event["choices"][0] async for event in events]
    assert len(parts) > 1 and all(part["delta"] == {} for part in parts)
    assert last["finish_reason"] == "tool_calls"
    assert last["delta"]["tool_calls"][0]["function"]["name"] == "add"
    assert last["delta"]["reasoning_content"] == "\x06\x07\x08"
    tokens = [token for part in (*parts, last) for token in part["token_ids"]]
    assert tokens == [6, 7, 8, 9, 10, 11]


ARGUMENTS = '{"a": 12}'


class CallingStream(FakeStream):
    """The first token names a function, and each other token is a character of its arguments."""

    num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> ChatResponse:
        start, self.num_tokens = self.num_tokens, self.num_tokens + len(token_ids)
        text = ARGUMENTS[max(start - 1, 0) : self.num_tokens - 1]
        part = ToolCallPart(index=0, arguments=text)
        if start == 0:
            part = replace(part, id="call-of-stream", name="add")
        return ChatResponse(content=None, tool_call_parts=(part,))

    def finish(self, token_ids: Sequence[int], stop_reason: int | str | None) -> ChatResponse:
        return self.add(token_ids)


class CallingEngine(FakeEngine):
    """Parsers write the arguments of a whole call with other spaces than the model."""

    stream: CallingStream | None = None

    def response_stream(
        self,
        sampling: Sampling = DEFAULT_SAMPLING,
        prompt: Sequence[int] = (),
        chat_request: ChatRequest | None = None,
    ) -> FakeStream:
        self.stream = CallingStream(self, sampling, is_parsed=True, has_tool_calls=True)
        return self.stream

    async def sample(self, num_tokens: int) -> None:
        """Sample tokens one by one, each when the stream has read the one before."""
        while not self.running:
            await asyncio.sleep(0.001)
        for number in range(1, num_tokens + 1):
            self.step(1)
            while number < num_tokens and (self.stream is None or self.stream.num_tokens < number):
                await asyncio.sleep(0.001)

    def chat_response(
        self, token_ids: Sequence[int], chat_request: ChatRequest, **_: Any
    ) -> ChatResponse:
        call = ToolCall(id="call-of-whole", name="add", arguments='{"a":12}')
        return ChatResponse(content=None, tool_calls=(call,), num_reasoning_tokens=3)


def function_parts(path: str, events: list[dict[str, Any]]) -> list[tuple[Any, Any, str]]:
    """Id, name and arguments of each part of the tool call in the events of a route."""
    if path == "/v1/chat/completions":
        choices = [choice for event in events for choice in event["choices"]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        return [
            (call.get("id"), call["function"].get("name"), call["function"]["arguments"])
            for call in calls
        ]
    if path == "/v1/responses":
        [item] = [each["item"] for each in events if each["type"].endswith("item.added")]
        texts = [each["delta"] for each in events if each["type"].endswith("arguments.delta")]
        assert events[-1]["response"]["output"][0]["arguments"] == "".join(texts)
        head = [(item["call_id"], item["name"], item["arguments"])]
        return head + [(None, None, text) for text in texts]
    [block] = [each["content_block"] for each in events if "content_block" in each]
    texts = [each["delta"]["partial_json"] for each in events if "partial_json" in str(each)]
    return [(block["id"], block["name"], "")] + [(None, None, text) for text in texts]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_tool_calls_are_sent_in_parts(tmp_path: Path, path: str) -> None:
    given, tool, _ = KEEP_ALIVES[path]
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 10}
    body = {**given, **limit, "tools": [tool], "stream": True}
    engine = CallingEngine(instant=False)
    engine.finish = "stop"
    async with foreign(tmp_path, engine=engine) as served, asyncio.timeout(60):
        sampling = asyncio.create_task(engine.sample(10))
        lines = (await served.http.post(path, json=body)).text.split("\n")
        await sampling
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    parts = function_parts(path, [json.loads(event) for event in data if event != "[DONE]"])
    assert "".join(text for _, _, text in parts) == ARGUMENTS
    assert [name for _, name, _ in parts if name] == ["add"]
    assert [call_id for call_id, _, _ in parts if call_id] == ["call-of-stream"]
    assert len(parts) > 3
    assert "tool_calls" in "".join(data) or path != "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_reasoning_tokens(tmp_path: Path, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with foreign(tmp_path, engine=CallingEngine()) as served:
        chat = await served.http.post("/v1/chat/completions", json={**CHAT, **options})
        given = KEEP_ALIVES["/v1/responses"][0]
        response = await served.http.post("/v1/responses", json={**given, "stream": stream})
    assert '"completion_tokens_details":{"reasoning_tokens":3}' in chat.text.replace(" ", "")
    assert '"output_tokens_details":{"reasoning_tokens":3}' in response.text.replace(" ", "")


KEEP_ALIVES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "/v1/chat/completions": (CHAT, TOOL, ": samples are still being generated"),
    "/v1/responses": (
        {"input": "abc", "max_output_tokens": 6},
        {"type": "function", "name": "add", "parameters": {"type": "object"}},
        ": samples are still being generated",
    ),
    "/v1/completions": (COMPLETION, None, ": samples are still being generated"),
    "/v1/messages": (
        CHAT,
        {"name": "add", "input_schema": {"type": "object"}},
        'event: ping\ndata: {"type":"ping"}',
    ),
}


@pytest.mark.parametrize("path", KEEP_ALIVES)
@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_silent_stream_is_kept_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, num_tokens: int
) -> None:
    """Also after tokens without an event, such as those of an incomplete tool call."""
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_SECONDS", 0.02)
    body, tool, keep_alive = KEEP_ALIVES[path]
    tools = {} if tool is None else {"tools": [tool]}
    body = {**body, **tools, "stream": True}
    async with (
        foreign(tmp_path, engine=ReasoningEngine(instant=False)) as served,
        served.http.stream("POST", path, json=body) as answer,
        asyncio.timeout(30),
    ):
        received, is_stepped = "", False
        async for text in answer.aiter_text():
            received += text
            if received.count(keep_alive) > 2 and not is_stepped:
                served.engine.step(num_tokens)
                received, is_stepped = "", True
            elif received.count(keep_alive) > 2:
                served.engine.step(6)
    assert is_stepped


@pytest.mark.parametrize("path", KEEP_ALIVES)
async def test_stream_with_events_has_no_keep_alives(tmp_path: Path, path: str) -> None:
    body, _, keep_alive = KEEP_ALIVES[path]
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        stepping(served.engine),
    ):
        answer = await served.http.post(path, json={**body, "stream": True})
    assert keep_alive not in answer.text


@pytest.mark.parametrize(
    ("path", "stream", "name"),
    [
        ("/v1/responses", response_events.ResponseStream, "_added"),
        ("/v1/messages", anthropic_stream._BlockEvents, "of_response"),
    ],
)
async def test_only_the_last_part_is_encoded_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, stream: Any, name: str
) -> None:
    on_loop = watched(monkeypatch, stream, name)
    closed_on_loop = watched(monkeypatch, response_events.OutputItems, "end")
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        stepping(served.engine),
    ):
        answer = await served.http.post(path, json={**KEEP_ALIVES[path][0], "stream": True})
    assert answer.status_code == 200
    assert len(on_loop) > 2 and on_loop == [True] * (len(on_loop) - 1) + [False]
    assert closed_on_loop == [False] * (path == "/v1/responses")


async def test_text_that_contradicts_the_whole_response_is_not_repeated(tmp_path: Path) -> None:
    class Contradicting(ReasoningEngine):
        def chat_response(
            self, token_ids: Sequence[int], chat_request: ChatRequest, **_: Any
        ) -> ChatResponse:
            return ChatResponse(content=self.decode(token_ids), reasoning=None)

    ReasoningStream.num_tokens = 0
    async with foreign(tmp_path, engine=Contradicting(instant=False)) as served:
        async with streaming(served, "/v1/chat/completions", CHAT) as events:
            served.engine.step(2)
            sent = [await anext(events), await anext(events)]
            served.engine.step(4)
            last = [event async for event in events][-1]
        value = served.server.metrics.registry.get_sample_value
        assert value("coppice_responses_not_parsed_total") == 1
    assert sent[1]["choices"][0]["delta"] == {"reasoning_content": "\x03\x04"}
    assert last["choices"][0]["delta"] == {}


@pytest.mark.parametrize("include", [False, True])
async def test_no_part_of_a_stop_string_is_sent(tmp_path: Path, include: bool) -> None:
    """The token ids are whole, as without a stream."""
    body = {
        **COMPLETION,
        "max_tokens": 9,
        "stop": ["CD"],
        "include_stop_str_in_output": include,
        "return_token_ids": True,
    }
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, "/v1/completions", body) as events,
        stepping(served.engine),
    ):
        choices = [event["choices"][0] async for event in events]
    assert "".join(choice["text"] for choice in choices) == ("@ABCD" if include else "@AB")
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "CD")
    assert [token for choice in choices for token in choice["token_ids"]] == [64, 65, 66, 67, 68]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_is_cut_at_its_stop_string(tmp_path: Path, stream: bool) -> None:
    body = {**CHAT, "stop": "\x05\x06", "stream": stream}
    async with foreign(tmp_path) as served:
        answer = await served.http.post("/v1/chat/completions", json=body)
    if stream:
        value = json.loads(answer.text.split("\n\n")[1].removeprefix("data: "))
        message = value["choices"][0]["delta"]
    else:
        value = answer.json()
        message = value["choices"][0]["message"]
    assert message["content"] == "\x03\x04"
    assert value["choices"][0]["stop_reason"] == "\x05\x06"


async def test_sglang_events_are_cumulative(tmp_path: Path) -> None:
    params = {"max_new_tokens": 6}
    body = {"input_ids": COMPLETION["prompt"], "sampling_params": params, "return_logprob": True}
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, "/generate", body) as events,
    ):
        served.engine.step(2)
        first = await anext(events)
        served.engine.step(9)
        [last] = [event async for event in events]
    assert (first["text"], first["output_ids"]) == ("@A", [64, 65])
    assert first["meta_info"]["finish_reason"] is None
    assert first["meta_info"]["weight_version"] == "v0" and "index" not in first
    assert (last["text"], last["output_ids"]) == (TEXT, [64, 65, 66, 67, 68, 69])
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert last["meta_info"]["output_token_logprobs"] == [
        [-0.5, token, None] for token in range(64, 70)
    ]


async def test_sglang_tokens_of_several_steps_are_one_event(tmp_path: Path) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 200}}
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, "/generate", body) as events,
    ):
        for _ in range(100):
            served.engine.step(1)
        assert len((await anext(events))["output_ids"]) == 100
        for _ in range(50):
            served.engine.step(1)
        assert len((await anext(events))["output_ids"]) == 150


async def test_sglang_stream_is_not_quadratic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token is an event at first; a long sample has one when it has grown by 1/32."""
    monkeypatch.setattr(sglang_generate, "MAX_QUIET_SECONDS", math.inf)
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4000}}
    engine = FakeEngine(instant=False, max_context_tokens=8192)
    async with (
        foreign(tmp_path, engine) as served,
        streaming(served, "/generate", body) as events,
        stepping(engine),
    ):
        sizes = [len(event["output_ids"]) async for event in events]
    assert sizes[-1] == 4000
    late = [size for size in sizes[:-1] if size > 256]
    assert all(size - before >= size / 32 for before, size in itertools.pairwise(late))


async def test_sglang_stream_sends_what_is_old_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_generate, "MAX_QUIET_SECONDS", 0.0)
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 400}}
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, "/generate", body) as events,
    ):
        for number in (300, 301):
            served.engine.step(300 if number == 300 else 1)
            assert len((await anext(events))["output_ids"]) == number


async def test_sglang_events_of_several_samples_have_an_index(tmp_path: Path) -> None:
    body = {"text": ["ab", "c"], "sampling_params": {"max_new_tokens": 3, "n": 2}}
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, "/generate", body, 4) as events,
    ):
        served.engine.step(3)
        found = {event["index"]: event["output_ids"] async for event in events}
    assert found == {0: [2, 3, 4], 1: [2, 3, 4], 2: [1, 2, 3], 3: [1, 2, 3]}


async def test_sglang_stream_can_be_aborted_by_its_id(tmp_path: Path) -> None:
    body = {"input_ids": [5], "rid": "mine", "sampling_params": {"max_new_tokens": 50}}
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, "/generate", body) as events,
    ):
        served.engine.step(2)
        await anext(events)
        await served.post("/abort_request", {"rid": "mine"})
        [last] = [event async for event in events]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["output_ids"] == [1, 2]


async def test_generate_streams_tokens_as_vllm_does(tmp_path: Path) -> None:
    """Read with vLLM's own model of a chunk."""
    params = {"max_tokens": 5, "n": 2, "logprobs": 2}
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": params,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    async with (
        foreign(tmp_path, engine=FakeEngine(instant=False)) as served,
        streaming(served, "/inference/v1/generate", body, 2) as events,
        stepping(served.engine),
    ):
        values = [event async for event in events]
    chunks = [GenerateTokensStreamResponse.model_validate(value) for value in values]
    *parts, last = chunks
    assert [chunk.prompt_token_ids for chunk in parts] == [[5, 6, 7], *[None] * (len(parts) - 1)]
    for index in (0, 1):
        choices = [chunk.choices[0] for chunk in parts if chunk.choices[0].index == index]
        assert [token for choice in choices for token in choice.token_ids] == [3, 4, 5, 6, 7]
        assert choices[-1].finish_reason == "length" and choices[0].finish_reason is None
        [span] = choices[-1].weight_versions
        assert (span.version, span.start, span.end) == ("v0", 0, 5)
        logprobs = [entry for choice in choices for entry in choice.logprobs.content]
        assert [entry.token_id for entry in logprobs] == [3, 4, 5, 6, 7]
    assert (last.choices, last.usage.completion_tokens) == ([], 10)


async def test_stream_of_generate_has_no_prompt_logprobs(tmp_path: Path) -> None:
    body = {"token_ids": [5], "sampling_params": {"prompt_logprobs": 1}, "stream": True}
    async with foreign(tmp_path) as served:
        _, problem = await served.refused("/inference/v1/generate", body)
    assert problem["errors"][0]["location"] == "prompt_logprobs"


def client(served: Foreign) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


async def test_openai_client_accumulates_a_chat(tmp_path: Path) -> None:
    """With its own accumulator of deltas."""
    engine = FakeEngine(instant=False)
    engine.finish = "stop"
    async with (
        foreign(tmp_path, engine=engine) as served,
        client(served) as speaker,
        speaker.chat.completions.stream(
            model="fake", messages=MESSAGES, max_tokens=6, logprobs=True
        ) as stream,
        stepping(engine),
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds.count("content.delta") > 1
    [choice] = final.choices
    assert choice.message.content == "\x03\x04\x05\x06\x07\x08"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.5] * 6


async def test_openai_client_reads_every_completion_part(tmp_path: Path) -> None:
    engine = FakeEngine(instant=False)
    async with (
        foreign(tmp_path, engine=engine) as served,
        client(served) as speaker,
        stepping(engine),
    ):
        stream = await speaker.completions.create(
            model="fake", prompt=COMPLETION["prompt"], max_tokens=6, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert len(chunks) > 2
