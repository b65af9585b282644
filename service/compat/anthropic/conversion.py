"""Conversion of Anthropic's messages to chat messages for the model's chat template.

The result is that of vLLM's converter, except that several text blocks of a message are one string,
as on the other chat routes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from service.compat.bodies import CompatModel
from service.errors import InvalidRequest

Blocks = Annotated[list[dict[str, Any]], Field(max_length=16384, fail_fast=True)]
Content = str | Blocks
BILLING_HEADER = "x-anthropic-billing-header"
"""Start of a system block of Claude Code that differs in every request.

As in vLLM, the block is left out: with it, no prefix of the prompt would be cached.
"""


class AnthropicMessage(CompatModel):
    """Message of a conversation; its content is text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: Content


def chat_messages(
    system: Content | None, messages: Sequence[AnthropicMessage], *, merges_system: bool
) -> list[dict[str, Any]]:
    """Convert a conversation; with `merges_system` all system messages are one, the first."""
    texts = [] if system is None else [_system_text(system)]
    if merges_system:
        texts += [_inline_system(message) for message in messages if message.role == "system"]
    head = "".join(texts)
    first = [{"role": "system", "content": head}] if head else []
    converted = (_converted(message, merges_system=merges_system) for message in messages)
    return [*first, *(found for each in converted for found in each)]


def _converted(message: AnthropicMessage, *, merges_system: bool) -> list[dict[str, Any]]:
    match message.role:
        case "system":
            text = "" if merges_system else _inline_system(message)
            return [{"role": "system", "content": text}] if text else []
        case "user":
            return list(_user_messages(message.content))
    return [_assistant_message(message.content)]


def _inline_system(message: AnthropicMessage) -> str:
    content = message.content
    return "" if _is_billing(content) else _system_text(content)


def _system_text(content: Content) -> str:
    if isinstance(content, str):
        return content
    texts = [_text(block) for block in content if _expects(block, "text", of="system")]
    return "".join(text for text in texts if not _is_billing(text))


def _is_billing(text: object) -> bool:
    return isinstance(text, str) and text.startswith(BILLING_HEADER)


def _user_messages(content: Content) -> Iterator[dict[str, Any]]:
    """Tool results as messages of their own, and then the text."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    texts = []
    for block in content:
        if block.get("type") == "tool_result":
            yield _tool_message(block)
        elif _expects(block, "text", "tool_result", of="user"):
            texts.append(_text(block))
    if any(texts):
        yield {"role": "user", "content": "".join(texts)}


def _tool_message(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        parts = [part for part in content if _is_text(part)]
        content = "\n".join(_text(part) for part in parts)
    return {
        "role": "tool",
        "tool_call_id": _string(block, "tool_use_id"),
        "content": _checked_text(content or ""),
    }


def _assistant_message(content: Content) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, reasoning, calls = [], [], []
    for block in content:
        match block.get("type"):
            case "thinking":
                reasoning.append(_string(block, "thinking"))
            case "redacted_thinking":
                pass  # opaque data of another server
            case "tool_use":
                calls.append(_tool_call(block))
            case _ if _expects(block, "text", "thinking", "tool_use", of="assistant"):
                texts.append(_text(block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input") or {}
    if not isinstance(arguments, dict):
        raise _wrong("the input of a tool_use block must be an object")
    function = {"name": _string(block, "name"), "arguments": json.dumps(arguments)}
    return {"id": _string(block, "id"), "type": "function", "function": function}


def _expects(block: Mapping[str, Any], *kinds: str, of: str) -> bool:
    """True for a text block. Raises InvalidRequest for blocks other than `kinds`."""
    if block.get("type") == "text":
        return True
    field = "system" if of == "system" else "messages"
    raise InvalidRequest.of_parameter(
        field,
        f"{_kind(block)} is not supported in a message of the role {of}, only {', '.join(kinds)}: "
        "remove images, documents and blocks of the API's own tools",
    )


def _is_text(part: object) -> bool:
    if isinstance(part, dict) and part.get("type") == "text":
        return True
    raise _wrong(
        f"{_kind(part)} is not supported in a tool result, only text: remove images and other media"
    )


def _kind(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return f"a block of type {kind[:64]!r}" if isinstance(kind, str) else "a block without a type"


def _text(block: Mapping[str, Any]) -> str:
    return _checked_text(block.get("text"))


def _checked_text(text: object) -> str:
    if isinstance(text, str):
        return text
    raise _wrong("the text of a block must be a string")


def _string(block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if isinstance(value, str):
        return value
    raise _wrong(f"{name} of a {block.get('type')} block must be a string")


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest.of_parameter("messages", message)
