"""Options of prompts of POST /v1/rollouts: chats with tools, truncation, echo and seeds."""

import threading
from pathlib import Path
from typing import Any

import pytest

from coppice.wire.chat import Message, Tool
from coppice.wire.rollouts import GroupRequest, Prompt
from service.rollouts.tokenizer import to_chat_request
from tests.fake_engine import FakeEngine
from tests.service.test_rollouts import body, group
from tests.serving import serving

USER = {"role": "user", "content": "abc"}
ADD = {"function": {"name": "add", "parameters": {"type": "object"}}}


def chat(**options: Any) -> dict[str, Any]:
    return {"prompt": {"messages": [USER], **options}}


def test_messages_have_the_shapes_of_the_chat_api() -> None:
    called = {"id": "c1", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
        {"role": "assistant", "reasoning": "so", "tool_calls": [called]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]
    prompt = Prompt(messages=[Message.model_validate(message) for message in messages])
    rendered = to_chat_request(prompt).messages
    assert rendered[0] == {"role": "user", "content": "ab"}
    assert rendered[1]["content"] == ""
    assert rendered[1]["tool_calls"] == [{"type": "function", **called}]
    assert rendered[2]["tool_call_id"] == "c1"


def test_parts_with_an_image_reach_the_engine_in_their_order() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    parts = [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}]
    text: dict[str, Any] = {"role": "system", "content": parts[:1]}
    messages = [Message.model_validate(text), Message.model_validate(USER | {"content": parts})]
    prompt = Prompt(messages=messages)
    assert prompt.num_images == 1
    rendered = to_chat_request(prompt).messages
    assert [message["content"] for message in rendered] == ["a", parts]


@pytest.mark.parametrize(
    "prompt",
    [
        {"text": "a", "tools": [ADD]},
        {"token_ids": [1], "add_generation_prompt": False},
        {"messages": [USER], "continue_final_message": True},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"spans": [{"token_ids": [1]}], "truncate_prompt_tokens": 1},
        {"text": "a", "truncate_prompt_tokens": 0},
    ],
)
def test_option_that_does_not_fit_the_prompt_is_refused(prompt: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Prompt.model_validate(prompt)


def test_options_of_a_chat_reach_the_engine() -> None:
    prompt = Prompt(
        truncation_side="right",
        messages=[Message(role="user", content="a")],
        tools=[Tool.model_validate(ADD)],
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
        truncate_prompt_tokens=7,
    )
    request = to_chat_request(prompt)
    assert request.tools[0]["function"]["name"] == "add"
    assert request.template_options == {"enable_thinking": False}
    assert (request.add_generation_prompt, request.continue_final_message) == (False, True)
    assert (request.truncate_prompt_tokens, request.truncation_side) == (7, "right")


async def test_response_is_split_into_a_message_on_request(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body(chat(tools=[ADD]), group(1), return_message=True)
        answer = (await served.http.post("/v1/rollouts", json=asked)).json()
    [[sample], [other]] = [answered["samples"] for answered in answer["groups"]]
    [call] = sample["message"]["tool_calls"]
    assert (call["name"], call["arguments"]) == ("add", "{}")
    assert "message" not in other


TREE = {"mode": "interval", "interval": 32, "max_leaves": 2}


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ({"prompt": {"text": "a"}}, {}),
        (group(1), {}),
        (chat(), {"branching": TREE}),
    ],
)
async def test_message_that_no_sample_could_have_is_refused(
    tmp_path: Path, prompt: dict[str, Any], options: dict[str, Any]
) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        asked = body(prompt, return_message=True, **options)
        answer = await served.http.post("/v1/rollouts", json=asked)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["location"] == "return_message"
    assert not engine.submitted


async def test_flattened_samples_of_a_tree_have_messages(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body(chat(), return_message=True, branching={**TREE, "flatten": True})
        answer = (await served.http.post("/v1/rollouts", json=asked)).json()
    assert all(sample["message"]["parsed"] for sample in answer["groups"][0]["samples"])


async def test_messages_are_converted_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for the prompt, and once for the parser of all responses."""
    convert, threads = Message.to_template_message, list[threading.Thread]()

    def recorded(message: Message) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return convert(message)

    monkeypatch.setattr(Message, "to_template_message", recorded)
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body({**chat(), "n": 3}, return_message=True)
        assert (await served.http.post("/v1/rollouts", json=asked)).status_code == 200
    assert len(threads) == 2 and threading.current_thread() not in threads


def test_schema_of_a_tool_is_not_copied() -> None:
    tool = Tool.model_validate({"function": {"name": "add", "parameters": {"default": None}}})
    rendered = tool.to_template_tool()
    assert rendered == tool.model_dump(exclude_none=True)
    assert rendered["function"]["parameters"] is tool.function.parameters


@pytest.mark.parametrize("prompt", [{"text": "abcdef"}, {"token_ids": [*b"abcdef"]}])
async def test_prompt_is_truncated_to_its_last_tokens_and_returned(
    tmp_path: Path, prompt: dict[str, Any]
) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        asked = body({"prompt": {**prompt, "truncate_prompt_tokens": 2}}, echo=True)
        answer = (await served.http.post("/v1/rollouts", json=asked)).json()
        cut = {"prompt": {**prompt, "truncate_prompt_tokens": 2, "truncation_side": "right"}}
        first = (await served.http.post("/v1/rollouts", json=body(cut, echo=True))).json()
    [answered] = answer["groups"]
    assert answered["prompt_token_ids"] == [*b"ef"]
    assert answered["num_prompt_tokens"] == 2
    assert first["groups"][0]["prompt_token_ids"] == [*b"ab"]


async def test_answer_has_no_prompt_unless_requested(tmp_path: Path) -> None:
    async with serving(FakeEngine(), tmp_path) as served:
        answer = (await served.http.post("/v1/rollouts", json=body(group(1)))).json()
    assert "prompt_token_ids" not in answer["groups"][0]


async def test_every_sample_gets_its_own_seed(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with serving(engine, tmp_path) as served:
        await served.http.post("/v1/rollouts", json=body(group(1, n=3, seeds=[7, 7, 9])))
    assert [request.seed for request in engine.submitted] == [7, 7, 9]


def test_seeds_need_one_per_sample_and_no_seed() -> None:
    prompt = Prompt(text="a")
    GroupRequest(prompt=prompt, n=2, seeds=[1, 2])
    with pytest.raises(ValueError, match="n seeds"):
        GroupRequest(prompt=prompt, n=2, seeds=[1])
    with pytest.raises(ValueError, match="n seeds"):
        GroupRequest(prompt=prompt, n=1, seed=1, seeds=[1])
