"""Chat messages of Anthropic's requests, compared with those of vLLM's converter.

Differences that every comparison allows for: a message without text has the content "", and several
text blocks are one string, as on the other chat routes. vLLM keeps the blocks, and its renderer
joins them with a line break for some templates and without one for others.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from service.compat.anthropic.bodies import MessagesBody
from tests.compat.test_tool_turns import ParsingEngine
from tests.compat.third_party import foreign
from tests.engine.chats import make_chat

pytestmark = pytest.mark.slow

TEXT = {"type": "text", "text": "b"}
USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "é": [None]}}
OTHER_USE = {"type": "tool_use", "id": "t2", "name": "now", "input": {}}
THINKING = {"type": "thinking", "thinking": "why", "signature": "x"}
REDACTED = {"type": "redacted_thinking", "data": "AA"}
BILLING = {"type": "text", "text": "x-anthropic-billing-header: 1"}


def result(content: object, use: str = "t1") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": use, "content": content}


def user(*blocks: object) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: object) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


ASKED = {"role": "user", "content": "a"}
LAST = {"role": "user", "content": "z"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "text": [ASKED],
    "turns": [ASKED, {"role": "assistant", "content": "b"}, LAST],
    "blocks": [user(TEXT, TEXT), assistant(TEXT, TEXT), LAST],
    "call": [ASKED, assistant(TEXT, USE), user(result("3"))],
    "call without text": [ASKED, assistant(USE), user(result("3"), TEXT)],
    "parallel calls": [ASKED, assistant(USE, OTHER_USE), user(result("3"), result("4", "t2"))],
    "thinking": [ASKED, assistant(THINKING, REDACTED, THINKING, TEXT, USE), user(result("3"))],
    "thinking only": [ASKED, assistant(THINKING), LAST],
    "result in parts": [ASKED, assistant(USE), user(result([TEXT, TEXT]))],
    "result without content": [
        ASKED,
        assistant(USE),
        user({"type": "tool_result", "tool_use_id": "t1"}),
    ],
    "failed result": [ASKED, assistant(USE), user({**result("no"), "is_error": True})],
    "text before the result": [ASKED, assistant(USE), user(TEXT, result("3"))],
    "nothing": [ASKED, user(), LAST],
    "system inside": [ASKED, {"role": "system", "content": "s"}, LAST],
    "system blocks inside": [ASKED, {"role": "system", "content": [BILLING, TEXT]}, LAST],
    "billing inside": [ASKED, {"role": "system", "content": [BILLING]}, LAST],
    "unicode": [{"role": "user", "content": "\u2028\x00🙂"}],
}
SYSTEMS: list[object] = [None, "s", [TEXT, TEXT], [BILLING, TEXT], [BILLING], ""]


def body(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 8, "messages": messages, **fields}


def theirs(given: dict[str, Any], *, merges: bool = False) -> Any:
    request = AnthropicMessagesRequest.model_validate(given)
    convert = AnthropicServingMessages.to_chat_completion_request
    return convert(request, merge_inline_system=merges)


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return {**{k: v for k, v in message.items() if v is not None}, "content": content}


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_messages_are_those_of_vllm(name: str, merges: bool) -> None:
    for system in SYSTEMS:
        given = body(CONVERSATIONS[name], system=system)
        ours = MessagesBody.model_validate(given).chat_request(merges_system=merges)
        expected = theirs(given, merges=merges).messages
        assert list(map(plain, ours.messages)) == list(map(plain, expected))


@pytest.mark.parametrize(
    "tool",
    [
        {"name": "add", "input_schema": {"type": "object"}},
        {"name": "add", "description": "adds", "input_schema": {"properties": {}}},
        {"name": "add", "input_schema": {"type": "object"}, "strict": True, "type": "custom"},
        {"name": "add", "input_schema": {}, "cache_control": {"type": "ephemeral"}},
    ],
)
def test_tools_are_those_of_vllm(tool: dict[str, Any]) -> None:
    given = body([ASKED], tools=[tool])
    ours = MessagesBody.model_validate(given).chat_request().tools
    expected = [found.model_dump(exclude_none=True) for found in theirs(given).tools]
    assert [dict(found) for found in ours] == expected


@pytest.mark.parametrize("choice", ["auto", "any", "none", "tool", None])
def test_tool_choice_is_that_of_vllm(choice: str | None) -> None:
    named = {"name": "add"} if choice == "tool" else {}
    fields = {} if choice is None else {"tool_choice": {"type": choice, **named}}
    given = body([ASKED], tools=[{"name": "add", "input_schema": {}}], **fields)
    ours = MessagesBody.model_validate(given).openai_tool_choice()
    expected = theirs(given).tool_choice
    # vLLM sets the choice of a request without one to auto, which is what none set means here.
    assert (ours or "auto") == (expected if isinstance(expected, str) else ours)
    if choice == "tool":
        assert ours is not None and not isinstance(ours, str)
        assert ours.function.name == expected.function.name


def test_thinking_is_an_option_of_the_template() -> None:
    """vLLM turns disabled thinking into a reasoning effort, which many templates do not have.

    It leaves enabled thinking to the template, and limits its tokens. Here `max_tokens` does.
    """

    def options(**fields: Any) -> Mapping[str, Any]:
        return MessagesBody.model_validate(body([ASKED], **fields)).chat_request().template_options

    assert options() == {}
    assert options(thinking={"type": "adaptive"}) == {}
    off = {"enable_thinking": False, "thinking": False}
    assert options(thinking={"type": "disabled"}) == off
    on = {"enable_thinking": True, "thinking": True}
    assert options(thinking={"type": "enabled", "budget_tokens": 1024}) == on
    effort = options(output_config={"effort": "low"})
    assert effort == {"reasoning_effort": "low", "enable_thinking": True}
    given = options(thinking={"type": "disabled"}, chat_template_kwargs={"thinking": True})
    assert given == {"enable_thinking": False, "thinking": True}


def test_response_continues_a_last_message_of_the_assistant() -> None:
    """As in Anthropic's API. vLLM begins another message of the assistant."""
    given = body([ASKED, assistant(TEXT)])
    ours = MessagesBody.model_validate(given).chat_request()
    assert (ours.continue_final_message, ours.add_generation_prompt) == (True, False)
    assert theirs(given).add_generation_prompt


SYSTEM_FIRST = """\
{%- for message in messages %}
{%- if message.role == "system" and not loop.first %}{{ raise_exception("first") }}{% endif %}
{{- message.role }}: {{ message.content }}
{% endfor %}"""


async def test_system_messages_move_to_the_start_if_the_template_needs_it(tmp_path: Path) -> None:
    chat = make_chat(tmp_path / "chat", SYSTEM_FIRST)
    inline = [ASKED, {"role": "system", "content": "t"}, LAST]
    async with foreign(tmp_path, engine=ParsingEngine(chat)) as served:
        await served.post("/v1/messages", body(inline, model="fake", system="s"))
        await served.post("/v1/messages", body([ASKED], model="fake", system="s"))
        prompts = [chat.tokenizer.decode(s.prompt_token_ids) for s in served.engine.submitted]
    assert [prompt.splitlines() for prompt in prompts] == [
        ["system: st", "user: a", "user: z"],
        ["system: s", "user: a"],
    ]
