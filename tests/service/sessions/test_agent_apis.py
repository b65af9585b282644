"""Conversations with tools over every API: each turn extends the tokens of the one before."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.service.sessions.agents import HELLO, Agent, tokens, training
from tests.service.sessions.harness import ASKED, TEXTS, Harness, added, harness, thought
from tests.service.sessions.scripted_engine import ScriptedEngine
from tests.service.sessions.template_families import FAMILIES, FamilyEngine, make_engine

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
FLAT: Any = {"type": "function", "name": "add", "parameters": PARAMETERS}
ASK: list[Any] = [{"role": "user", "content": ASKED}]
Converse = Callable[..., Awaitable[str]]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FamilyEngine:
    directory = tmp_path_factory.mktemp("family") / "qwen3"
    return make_engine(directory, FAMILIES["qwen3"], tool_parser="hermes", reasoning_parser="qwen3")


@pytest.fixture(scope="module")
def unparsed(tmp_path_factory: pytest.TempPathFactory) -> FamilyEngine:
    """An engine without parsers."""
    return make_engine(tmp_path_factory.mktemp("family") / "qwen3", FAMILIES["qwen3"])


def result_of(call: Any) -> str:
    arguments = json.loads(call if isinstance(call, str) else call["arguments"])
    return str(arguments["a"] + arguments["b"])


async def events(agent: Agent, path: str, body: Any) -> list[Any]:
    answer = await agent.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    found = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(each) for each in found if each.startswith("{")]


async def chat_messages(agent: Agent, body: Any, *, stream: bool, n: int = 1) -> list[Any]:
    """Messages of the choices, without their reasoning, as most agents keep them."""
    body = {**body, "n": n}
    if not stream:
        answer = await agent.chat(**body)
        assert answer.status_code == 200, answer.text
        return [_kept(choice["message"]) for choice in answer.json()["choices"]]
    messages: list[Any] = [{"role": "assistant", "content": "", "tool_calls": []} for _ in range(n)]
    for chunk in await events(agent, "/v1/chat/completions", body):
        for choice in chunk["choices"]:
            _add_delta(messages[choice["index"]], choice["delta"])
    return [_kept(message) for message in messages]


def _kept(message: Any) -> Any:
    return {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}


def _add_delta(message: Any, delta: Any) -> None:
    message["content"] += delta.get("content") or ""
    for part in delta.get("tool_calls") or ():
        if part["index"] == len(message["tool_calls"]):
            function = {"name": part["function"]["name"], "arguments": ""}
            call = {"id": part["id"], "type": "function", "function": function}
            message["tool_calls"].append(call)
        arguments = part["function"].get("arguments") or ""
        message["tool_calls"][part["index"]]["function"]["arguments"] += arguments


def tool_results(message: Any) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": result_of(call["function"])}
        for call in message.get("tool_calls", ())
    ]


async def over_chat(agent: Agent, *, stream: bool, **fields: Any) -> str:
    messages, results = list(ASK), [None]
    while results:
        body = {"messages": messages, "tools": [ADD], **fields}
        [message] = await chat_messages(agent, body, stream=stream)
        results = tool_results(message)
        messages += [message, *results]
    return str(message["content"])


async def over_responses(agent: Agent, *, stream: bool, by_id: bool = False, **fields: Any) -> str:
    """A loop that sends all items without reasoning, or those after the previous response."""
    items: list[Any] = list(ASK)
    previous: dict[str, str] = {}
    while True:
        body = {"input": items, "tools": [FLAT], **previous, **fields}
        if stream:
            *_, last = await events(agent, "/v1/responses", body)
            response = last["response"]
        else:
            answer = await agent.post("/v1/responses", body)
            assert answer.status_code == 200, answer.text
            response = answer.json()
        output = [item for item in response["output"] if item["type"] != "reasoning"]
        results = [
            {"type": "function_call_output", "call_id": each["call_id"], "output": result_of(each)}
            for each in output
            if each["type"] == "function_call"
        ]
        if not results:
            return str(output[-1]["content"][0]["text"])
        if by_id:
            items, previous = results, {"previous_response_id": response["id"]}
        else:
            items = [*items, *output, *results]


async def over_messages(agent: Agent, *, stream: bool, **fields: Any) -> str:
    messages = list(ASK)
    tool = {"name": "add", "input_schema": PARAMETERS}
    while True:
        body = {"model": "any", "max_tokens": 200, "messages": messages, "tools": [tool], **fields}
        if stream:
            content = _blocks(await events(agent, "/v1/messages", body))
        else:
            answer = await agent.post("/v1/messages", body)
            assert answer.status_code == 200, answer.text
            content = answer.json()["content"]
        content = [block for block in content if block["type"] != "thinking"]
        calls = [block for block in content if block["type"] == "tool_use"]
        if not calls:
            return str(content[-1]["text"])
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call["id"],
                "content": result_of(json.dumps(call["input"])),
            }
            for call in calls
        ]
        messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": results},
        ]


def _blocks(found: list[Any]) -> list[Any]:
    blocks: list[Any] = []
    for event in found:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                blocks.append(block)
            case {"delta": {"type": "text_delta", "text": text}}:
                blocks[-1]["text"] += text
            case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                blocks[-1]["input"] = (blocks[-1]["input"] or "") + text
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    return blocks


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("converse", [over_chat, over_responses, over_messages])
async def test_turns_with_tools_are_one_path(
    tmp_path: Path, family: FamilyEngine, converse: Converse, stream: bool
) -> None:
    async with harness(tmp_path, family) as found:
        assert (await converse(found.agent, stream=stream)).strip() == "It is 14."
        await found.check()


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_by_the_id_of_the_previous_response_are_one_path(
    tmp_path: Path, family: FamilyEngine, stream: bool
) -> None:
    async with harness(tmp_path, family) as found:
        answer = await over_responses(found.agent, stream=stream, by_id=True)
        assert answer.strip() == "It is 14."
        await found.check()


ONE_CALL = (f"<think>\nTwo sums.\n</think>\n\n{added(2, 3)}\n{added(4, 5)}", thought("It is 5."))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("converse", "fields"),
    [
        (over_chat, {"parallel_tool_calls": False}),
        (over_responses, {"parallel_tool_calls": False}),
        (over_messages, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
)
async def test_calls_that_the_agent_does_not_receive_are_not_in_the_conversation(
    tmp_path: Path, family: FamilyEngine, converse: Converse, fields: Any, stream: bool
) -> None:
    async with harness(tmp_path, family, ONE_CALL) as found:
        assert (await converse(found.agent, stream=stream, **fields)).strip() == "It is 5."
        await found.check(num_calls=2)


STRICT_CHAT = {"tools": [{"type": "function", "function": {**ADD["function"], "strict": True}}]}
STRICT_RESPONSES = {"tools": [{**FLAT, "strict": True}]}


@pytest.mark.parametrize(
    ("converse", "fields"), [(over_chat, STRICT_CHAT), (over_responses, STRICT_RESPONSES)]
)
async def test_strict_tools_that_the_model_chooses_constrain_nothing(
    tmp_path: Path, family: FamilyEngine, converse: Converse, fields: Any
) -> None:
    engine = ScriptedEngine(family, TEXTS)
    async with training(tmp_path, engine) as trainer:
        [agent] = await trainer.create(sampling={"max_tokens": 200})
        await converse(agent, stream=False, **fields)
        await Harness(trainer, agent, engine.sampled).check()
    assert [sample.sampling.structured_outputs for sample in engine.submitted] == [None] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_of_tool_calls_choose_among_equal_messages(
    tmp_path: Path, family: FamilyEngine, stream: bool
) -> None:
    texts = (thought(added(2, 3)), thought(added(2, 3)), thought("5."), thought("Five."))
    async with harness(tmp_path, family, texts) as found:
        body: Any = {"messages": ASK, "tools": [ADD]}
        both = await chat_messages(found.agent, body, stream=stream, n=2)
        for message in both:
            messages = [*ASK, message, *tool_results(message)]
            await chat_messages(found.agent, {**body, "messages": messages}, stream=stream)
        answer = await found.check_samples(["new_conversation", "retry", "extended", "extended"])
    [group] = answer["groups"]
    parents = {part["id"]: part.get("parent") for part in group["segments"]}
    first, second, *continued = [turn["segment"] for turn in answer["turns"]]
    assert [parents[parents[each]] for each in continued] == [first, second]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_of_several_samples_is_continued(
    tmp_path: Path, family: FamilyEngine, stream: bool
) -> None:
    texts = (thought("One."), thought("Two."), thought("Three."), thought("Four."))
    async with harness(tmp_path, family, texts) as found:
        one, two = await chat_messages(found.agent, {"messages": ASK}, stream=stream, n=2)
        assert (one["content"].strip(), two["content"].strip()) == ("One.", "Two.")
        for message in (two, one):
            messages = [*ASK, message, {"role": "user", "content": "go on"}]
            await chat_messages(found.agent, {"messages": messages}, stream=stream)
        await found.check_samples(["new_conversation", "retry", "extended", "extended"])


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_without_parsers_are_one_path(
    tmp_path: Path, unparsed: FamilyEngine, stream: bool
) -> None:
    texts = (thought("One."), thought("Two."))
    async with harness(tmp_path, unparsed, texts) as found:
        [message] = await chat_messages(found.agent, {"messages": ASK}, stream=stream)
        messages = [*ASK, message, {"role": "user", "content": "go on"}]
        await chat_messages(found.agent, {"messages": messages}, stream=stream)
        await found.check(num_calls=2)


async def test_forced_call_is_continued(tmp_path: Path, family: FamilyEngine) -> None:
    options = {"overrides": ["structured_outputs"]}
    async with harness(tmp_path, family, (thought(added(2, 3)), "It is 5."), **options) as found:
        body: Any = {"messages": ASK, "tools": [ADD], "tool_choice": "required"}
        [message] = await chat_messages(found.agent, body, stream=False)
        messages = [*ASK, message, *tool_results(message)]
        await chat_messages(found.agent, {"messages": messages, "tools": [ADD]}, stream=False)
        await found.check(num_calls=2)


async def test_reasoning_that_the_agent_sends_reaches_the_template(
    tmp_path: Path, family: FamilyEngine
) -> None:
    async with harness(tmp_path, family, [thought("It is 5.")] * 2) as found:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        for name in ("reasoning", "reasoning_content"):
            message = {"role": "assistant", "content": "", name: "I add.", "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": "1", "content": "5"}
            await chat_messages(
                found.agent, {"messages": [*ASK, message, result], "tools": [ADD]}, stream=False
            )
        prompts = [family.decode(each.prompt) for each in found.sampled]
    assert ["<think>\nI add.\n</think>" in prompt for prompt in prompts] == [True, True]


async def test_counted_tokens_are_those_of_the_prompt(tmp_path: Path, family: FamilyEngine) -> None:
    async with harness(tmp_path, family, [thought("One."), "Two."]) as found:
        body: Any = {"model": "any", "messages": [*ASK], "thinking": {"type": "disabled"}}
        for _ in range(2):
            counted = await found.agent.post("/v1/messages/count_tokens", body)
            answer = await found.agent.post("/v1/messages", {**body, "max_tokens": 99})
            assert answer.status_code == 200, answer.text
            assert counted.json()["input_tokens"] == len(found.sampled[-1].prompt)
            reply = {"role": "assistant", "content": answer.json()["content"]}
            body["messages"] += [reply, {"role": "user", "content": "go on"}]
        await found.check(num_calls=2)


IMAGE: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SOURCE: Any = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "text only"),
        (
            RESPONSES,
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": IMAGE["image_url"]["url"]}
                        ],
                    }
                ]
            },
            "text only",
        ),
        (
            MESSAGES,
            {
                "model": "any",
                "max_tokens": 9,
                "messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}],
            },
            "text only",
        ),
        (CHAT, {"messages": HELLO, "echo": True}, "echo"),
        (CHAT, {"messages": HELLO, "prompt_logprobs": 0}, "prompt_logprobs"),
        (CHAT, {"messages": HELLO, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "one prompt"),
        ("/v1/completions", {"prompt": "a", "prompt_embeds": "AAAA"}, ""),
        (
            MESSAGES,
            {
                "model": "any",
                "max_tokens": 9,
                "messages": HELLO,
                "thread": {"type": "continue", "previous_message_id": "a"},
            },
            "send all messages",
        ),
    ],
)
async def test_what_a_session_cannot_record_is_refused(
    tmp_path: Path, path: str, body: Any, message: str
) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(sampling={"max_tokens": 3})
        answer = await agent.post(path, body)
        assert answer.status_code == 400, answer.text
        assert message in json.dumps(answer.json()["error"])
    assert trainer.engine.submitted == []


@pytest.mark.parametrize(("number", "kept"), [(3, b"llo"), (-1, b"hello")])
async def test_prompt_of_a_conversation_is_truncated(
    tmp_path: Path, number: int, kept: bytes
) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(sampling={"max_tokens": 3})
        await agent.text(truncate_prompt_tokens=number)
    assert list(trainer.engine.submitted[0].prompt_token_ids) == [*kept]


async def test_parts_of_a_message_are_its_text(tmp_path: Path) -> None:
    async with training(tmp_path) as trainer:
        [agent] = await trainer.create(sampling={"max_tokens": 3})
        text = await agent.text()
        parts = [{"type": "text", "text": text[:1]}, {"type": "text", "text": text[1:]}]
        messages = [*HELLO, {"role": "assistant", "content": parts}, *HELLO]
        await agent.text(messages)
        answer = await trainer.finish(agent)
    assert tokens(answer) == [(True, [5, 6, 7]), (False, [*b"hello"]), (True, [13, 14, 15])]
