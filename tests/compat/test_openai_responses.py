"""OpenAI's own released client against the Responses API of a server on a socket."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.types.chat import ChatRequest, ChatResponse, ToolCall
from service.compat.responses import store as response_store
from service.compat.responses.store import (
    KEEP_SECONDS,
    ResponseName,
    ResponseStore,
    StoredResponse,
)
from tests.compat.test_anthropic_client import REASONED, AnsweringEngine
from tests.compat.test_openai_client import client
from tests.compat.test_tool_turns import ParsingEngine
from tests.compat.third_party import foreign
from tests.engine.chats import TemplateChat, make_chat
from tests.service.keyfile import bearer, write_keys
from tests.service.sessions.agents import training

PATH = "/v1/responses"
TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
SHELL: Any = {"type": "custom", "name": "shell"}
BODY: dict[str, Any] = {"model": "fake", "input": "abc", "max_output_tokens": 2}
CREATE: Any = BODY


async def test_response(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        answer = await speaker.responses.create(**CREATE, instructions="s", metadata={"a": "b"})
        [sample] = served.engine.submitted
    assert bytes(sample.prompt_token_ids) == b"sabc"
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status) == ("response", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "\x04\x05"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (4, 2)
    assert (answer.instructions, answer.metadata) == ("s", {"a": "b"})
    assert answer.model_extra is not None
    assert answer.model_extra["weight_versions"] == [{"version": "v0", "start": 0, "end": 2}]


async def test_token_ids_are_returned_on_request(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        answer = await served.post(PATH, {**BODY, "return_token_ids": True})
    assert (answer["prompt_token_ids"], answer["token_ids"]) == ([97, 98, 99], [3, 4])


async def test_reasoning_and_parallel_tool_calls(tmp_path: Path) -> None:
    engine = AnsweringEngine(REASONED)
    engine.finish = "stop"
    async with foreign(tmp_path, engine=engine) as served, client(served) as speaker:
        answer = await speaker.responses.create(
            **CREATE, tools=[TOOL], include=["reasoning.encrypted_content"]
        )
        one = await speaker.responses.create(**CREATE, tools=[TOOL], parallel_tool_calls=False)
    reasoning, message, first, second = [item.model_dump() for item in answer.output]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "why"}]
    assert reasoning["encrypted_content"].startswith("coppice:")
    assert message["content"][0]["text"] == "hello"
    assert [(c["call_id"], c["arguments"]) for c in (first, second)] == [
        ("call-1", '{"a": 1}'),
        ("call-2", '{"a": 2}'),
    ]
    assert {item["status"] for item in (reasoning, message, first, second)} == {"completed"}
    assert answer.status == "completed"
    assert [item.type for item in one.output] == ["reasoning", "message", "function_call"]


async def test_streamed_response_is_the_whole_response(tmp_path: Path) -> None:
    shell = ToolCall(id="call-3", name="shell", arguments='{"input": "ls"}')
    spoken = ChatResponse(
        content="hello", reasoning="why", tool_calls=(*REASONED.tool_calls, shell)
    )
    engine = AnsweringEngine(spoken)
    engine.finish = "stop"
    async with foreign(tmp_path, engine=engine) as served, client(served) as speaker:
        whole = await speaker.responses.create(**CREATE, tools=[TOOL, SHELL])
        stream = await speaker.responses.create(**CREATE, tools=[TOOL, SHELL], stream=True)
        events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == 5
    done = [event.item for event in events if event.type == "response.output_item.done"]
    final = events[-1].response
    assert [_plain(item) for item in done] == [_plain(item) for item in final.output]
    assert [_plain(item) for item in final.output] == [_plain(item) for item in whole.output]
    assert final.output[-1].input == "ls"
    assert final.usage == whole.usage


def _plain(item: Any) -> dict[str, Any]:
    return dict(item.model_dump(exclude={"id", "parsed_arguments"}))


async def test_helper_of_the_client_accumulates_the_stream(tmp_path: Path) -> None:
    engine = AnsweringEngine(REASONED)
    engine.finish = "stop"
    async with (
        foreign(tmp_path, engine=engine) as served,
        client(served) as speaker,
        speaker.responses.stream(**CREATE, tools=[TOOL]) as stream,
    ):
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]


async def test_text_is_streamed_token_by_token(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        served.engine.instant = False
        stream = await speaker.responses.create(**{**CREATE, "max_output_tokens": 3}, stream=True)
        texts, last = [], None
        async for event in stream:
            if event.type == "response.in_progress":
                served.engine.step(2)
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
                served.engine.step(1)
            last = event.type
    assert (texts, last) == (["\x03\x04", "\x05"], "response.incomplete")


async def test_logprobs_are_those_of_the_sample(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        answer: Any = await speaker.responses.create(
            **CREATE, include=["message.output_text.logprobs"], top_logprobs=1
        )
    [entry, _] = answer.output[0].content[0].logprobs
    assert (entry.token, entry.logprob, len(entry.top_logprobs)) == ("\x03", -0.5, 1)


async def test_conversation_continues_from_a_stored_response(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        first = await speaker.responses.create(**CREATE, instructions="s")
        second = await speaker.responses.create(
            **{**CREATE, "input": "d"}, previous_response_id=first.id, instructions="t"
        )
        third = await speaker.responses.create(
            **{**CREATE, "input": "e"}, previous_response_id=second.id, stream=True
        )
        last: Any = [event async for event in third][-1]
        prompts = [bytes(sample.prompt_token_ids) for sample in served.engine.submitted]
        assert prompts == [b"sabc", b"tabc\x04\x05d", b"abc\x04\x05d\x07\x08e"]
        stored = await speaker.responses.retrieve(first.id)
        assert stored.output_text == first.output_text
        assert (await speaker.responses.retrieve(last.response.id)).output_text == "\x09\n"
        await speaker.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await speaker.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="send the whole input"):
            await speaker.responses.create(**CREATE, previous_response_id=first.id)


class RecordingEngine(AnsweringEngine):
    """Records the messages of the conversations that it renders."""

    def __init__(self, response: ChatResponse) -> None:
        super().__init__(response)
        self.rendered: list[Any] = []

    def encode_chat(self, chat_request: ChatRequest) -> list[int]:
        self.rendered.append(chat_request.messages)
        return super().encode_chat(chat_request)


@pytest.mark.parametrize("num_calls", [0, 1])
async def test_continued_message_is_stored_as_one(tmp_path: Path, num_calls: int) -> None:
    calls = (ToolCall(id="call-1", name="add", arguments="{}"),) * num_calls
    engine = RecordingEngine(ChatResponse(content=" upon", tool_calls=calls))
    conversation = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]},
        {"role": "assistant", "content": "Once", "status": "incomplete"},
    ]
    async with foreign(tmp_path, engine=engine) as served:
        given = {**BODY, "tools": [TOOL], "instructions": "s"}
        first = await served.post(PATH, {**given, "input": conversation})
        await served.post(PATH, {**given, "previous_response_id": first["id"], "input": "b"})
    system, user, told, last = engine.rendered[-1]
    assert (told["role"], told["content"], told["reasoning"]) == ("assistant", "Once upon", "why")
    assert len(told.get("tool_calls", [])) == num_calls
    assert [message["content"] for message in (system, user, last)] == ["s", "a", "b"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [r'{"input": "\ud83d"}', '{"input": ' + "[" * 5000, "ls"])
async def test_input_that_json_cannot_express_is_passed_as_text(
    tmp_path: Path, text: str, stream: bool
) -> None:
    call = ToolCall(id="call-1", name="shell", arguments=text)
    engine = AnsweringEngine(ChatResponse(content=None, tool_calls=(call,)))
    async with foreign(tmp_path, engine=engine) as served, client(served) as speaker:
        answer: Any = await speaker.responses.create(**CREATE, tools=[SHELL], stream=stream)
        response = [event async for event in answer][-1].response if stream else answer
    [item] = response.output
    assert (item.type, item.input) == ("custom_tool_call", text)


async def test_response_is_not_stored_if_not_wanted(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        answer = await speaker.responses.create(**CREATE, store=False)
        with pytest.raises(openai.NotFoundError):
            await speaker.responses.retrieve(answer.id)


async def test_stored_response_is_private_to_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    secrets = write_keys(file, one="rollout", two="rollout")
    async with foreign(tmp_path, server={"keys_file": file}) as served:
        answer = await served.post(PATH, BODY, headers=bearer(secrets["one"]))
        path = f"{PATH}/{answer['id']}"
        for secret, status in ((secrets["one"], 200), (secrets["two"], 404)):
            found = await served.http.get(path, headers=bearer(secret))
            assert found.status_code == status
        body = {**BODY, "previous_response_id": answer["id"]}
        status, _ = await served.refused(PATH, body, headers=bearer(secrets["two"]))
        assert status == 400


async def test_tool_loop_of_three_turns(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With items sent back, with encrypted reasoning only, and from a stored response."""
    chat: TemplateChat = make_chat(
        tmp_path_factory.mktemp("chat"), tool_parser="hermes", reasoning_parser="qwen3"
    )
    items: list[Any] = [{"role": "user", "content": "1 + 2"}]
    fields: Any = {"model": "fake", "max_output_tokens": 2, "tools": [TOOL]}
    async with foreign(tmp_path, engine=ParsingEngine(chat)) as served, client(served) as speaker:
        include: Any = ["reasoning.encrypted_content"]
        first = await speaker.responses.create(**fields, input=items, include=include)
        items += _without_text(first.output)
        items.append(_output(first))
        second = await speaker.responses.create(**fields, input=items)
        third = await speaker.responses.create(
            **fields, input=[_output(second)], previous_response_id=second.id
        )
        prompt = chat.tokenizer.decode(served.engine.submitted[-1].prompt_token_ids)
    assert [item.type for item in third.output] == ["reasoning", "function_call"]
    assert prompt.count('<think>I add</think> add({"a": 1})') == 2
    assert prompt.count("tool: 3") == 2


def _without_text(output: Any) -> list[dict[str, Any]]:
    """Items as a client sends them back that keeps no text of reasoning."""
    return [item.model_dump(exclude={"content"}, exclude_none=True) for item in output]


def _output(response: Any) -> Any:
    call = response.output[-1]
    return {"type": "function_call_output", "call_id": call.call_id, "output": "3"}


@pytest.mark.parametrize(
    ("text", "constraint"),
    [
        ({"type": "json_schema", "name": "n", "schema": {"type": "integer"}}, "json"),
        ({"type": "json_object"}, "json_object"),
        ({"type": "text"}, None),
    ],
)
async def test_text_format_is_a_constraint(
    tmp_path: Path, text: Any, constraint: str | None
) -> None:
    async with foreign(tmp_path) as served:
        await served.post(PATH, {**BODY, "text": {"format": text}})
        [sample] = served.engine.submitted
    found = sample.sampling.structured_outputs
    assert (found and constraint and getattr(found, constraint) is not None) == (
        True if constraint else found
    )


@pytest.mark.parametrize(
    ("choice", "kind"),
    [("required", "array"), ({"type": "function", "name": "add"}, "object")],
)
async def test_forced_calls_are_constrained(tmp_path: Path, choice: Any, kind: str) -> None:
    async with foreign(tmp_path) as served:
        body = {**BODY, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        await served.post(PATH, body)
        [sample] = served.engine.submitted
    constraint = sample.sampling.structured_outputs
    assert constraint is not None and constraint.json is not None
    assert json.loads(constraint.json)["type"] == kind
    assert ("maxItems" in constraint.json) == (kind == "array")


async def test_forced_call_has_no_text_to_format(tmp_path: Path) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "integer"}}}
    async with foreign(tmp_path) as served:
        body = {**BODY, "tools": [TOOL], "tool_choice": "required", "text": text}
        await served.post(PATH, {**body, "text": {**text, "verbosity": "low"}})
        [sample] = served.engine.submitted
    constraint = sample.sampling.structured_outputs
    assert constraint is not None and constraint.json is not None
    assert json.loads(constraint.json)["type"] == "array"


@pytest.mark.parametrize("name", ["input_tokens", "compact"])
async def test_unsupported_route_names_the_alternative(tmp_path: Path, name: str) -> None:
    async with foreign(tmp_path) as served:
        answer = await served.http.post(f"{PATH}/{name}", json={})
    assert answer.json()["code"] == "unsupported"


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"input": [{"type": kind, **fields}]}


@pytest.mark.parametrize(
    ("fields", "location"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input"),
        ({"input": [{}]}, "input"),
        (item("item_reference", id="a"), "input"),
        (item("web_search_call", id="a"), "input"),
        (item("function_call", name="add"), "input"),
        (item("function_call_output", call_id="a", output=[{"type": "input_file"}]), "input"),
        (item("function_call_output", call_id="a"), "input"),
        (item("reasoning", encrypted_content="gAAAA", summary=[]), "input"),
        (item("reasoning", content="a"), "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{**SHELL, "format": {"type": "grammar"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "a"}}, "prompt"),
        ({"conversation": "a"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"include": ["everything"]}, "include"),
        ({"n": 2}, "n"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
async def test_unsupported_input_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], location: str
) -> None:
    async with foreign(tmp_path) as served:
        status, problem = await served.refused(PATH, {**BODY, **fields})
        assert (status, problem["error"]["type"]) == (400, "invalid_request_error")
        assert problem["error"]["param"].startswith(location)
        assert served.engine.submitted == []


async def test_routes_of_background_responses_name_the_alternative(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served:
        status, problem = await served.refused(f"{PATH}/resp_a/cancel")
    assert (status, problem["code"]) == (400, "unsupported")


@pytest.mark.parametrize("stream", [False, True])
async def test_aborted_sample_is_an_error(tmp_path: Path, stream: bool) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        served.engine.finish = "abort"
        if not stream:
            with pytest.raises(openai.InternalServerError, match="aborted"):
                await speaker.responses.create(**CREATE)
            return
        running = await speaker.responses.create(**CREATE, stream=True)
        [*_, last] = [event async for event in running]
    assert last.type == "response.failed"
    assert last.response.error is not None and "aborted" in last.response.error.message


async def test_failed_stream_is_reported(tmp_path: Path) -> None:
    async with foreign(tmp_path) as served, client(served) as speaker:
        served.engine.instant = False
        stream = await speaker.responses.create(**CREATE, stream=True)
        served.engine.die()
        [*_, last] = [event async for event in stream]
    assert last.type == "response.failed"
    assert last.response.status == "failed"


def stored(num_bytes: int) -> StoredResponse:
    return StoredResponse(response=b" " * (num_bytes - 1), messages=b" ")


def name(owner: str, response_id: str, *, session: str = "") -> ResponseName:
    return ResponseName(owner=owner, scope=owner + session, id=response_id)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_OWNER_BYTES", 10)
    monkeypatch.setattr(response_store, "MAX_BYTES", 80)


@pytest.mark.usefixtures("limits")
def test_store_is_bounded_per_key_in_total_and_in_time() -> None:
    now = [0.0]
    store = ResponseStore(lambda: now[0])
    store.put(name("a", "large"), stored(11))
    assert store.get(name("a", "large")) is None
    store.put(name("a", "1"), stored(6))
    store.put(name("b", "1"), stored(1))
    store.put(name("a", "2"), stored(5))
    assert store.get(name("a", "1")) is None
    assert store.get(name("a", "2")) and store.get(name("b", "1"))
    now[0] = KEEP_SECONDS
    assert store.get(name("a", "2")) is None
    for owner in range(9):
        store.put(name(f"{owner}", "1"), stored(10))
    assert store.get(name("0", "1")) is None
    assert store.get(name("1", "1")) is not None


@pytest.mark.usefixtures("limits")
def test_sessions_of_a_key_share_its_limit_but_not_their_responses() -> None:
    store = ResponseStore()
    store.put(name("b", "1"), stored(10))
    for session in range(20):
        store.put(name("a", f"{session}", session=f"/{session}"), stored(10))
    assert store.get(name("b", "1")) is not None
    assert store.get(name("a", "18", session="/18")) is None
    assert store.get(name("a", "19", session="/19")) is not None
    assert store.get(name("a", "19", session="/18")) is None
    assert store.get(name("a", "19")) is None


async def test_response_of_a_session_counts_for_the_owner_of_the_session(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        one, other = await trainer.create(n=2, sampling={"max_tokens": 3})
        made = await one.post(PATH, {"input": "abc"})
        path = f"{PATH}/{made.json()['id']}"
        found = await one.http.get(one.url + path, headers=bearer(one.key))
        assert found.json() == made.json()
        assert (
            await other.http.get(other.url + path, headers=bearer(other.key))
        ).status_code == 404
        assert (await other.http.get(trainer.served.url + path)).status_code == 404
        store: ResponseStore = trainer.served.app.state.compat.state.responses
        own = ResponseName(owner="local", scope=f"local/{one.id}", id=made.json()["id"])
        assert store.get(own) is not None
