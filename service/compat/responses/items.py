"""Conversion between chat messages and the input and output items of OpenAI's Responses API.

The chat messages are those of vLLM's converter, except that all parts of an item count, not only
the first one.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json

from service.compat.bodies import CompatModel, Name
from service.errors import InvalidRequest

Items = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=16384, fail_fast=True)]
Message = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
CUSTOM_INPUT = "input"
REASONING_PREFIX = "coppice:"
"""Start of our `encrypted_content`; the rest is the text of the reasoning in base64.

It is not secret. Clients that store no responses send it back, and not the text.
"""


class ResponseTool(CompatModel):
    """Tool of the client; tools that OpenAI's API runs itself have another `type`."""

    type: Annotated[str, Field(max_length=64)]
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None

    def to_template_tool(self) -> dict[str, Any]:
        if self.type not in ("function", "custom"):
            raise _wrong_tool(f"type {self.type!r} is not supported: run the tool in the client")
        if self.name is None:
            raise _wrong_tool("name is required")
        if (self.format or {"type": "text"}).get("type") != "text":
            raise _wrong_tool("only the format text of custom tools is supported")
        parameters = self.parameters if self.type == "function" else _custom_parameters()
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
            "strict": self.strict,
        }
        return {
            "type": "function",
            "function": {name: value for name, value in function.items() if value is not None},
        }


class ToolName(CompatModel):
    """The one tool that a response must call."""

    type: Literal["function", "custom"]
    name: Name


def _custom_parameters() -> dict[str, Any]:
    """Schema of a custom tool, whose input is text, as a function of one string."""
    text = {"type": "string", "description": "The freeform text payload for this tool."}
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


def custom_input(arguments: str) -> str:
    """Input of a custom tool in the arguments of its function; else the arguments themselves."""
    try:
        value = from_json(arguments)
    except ValueError:  # also for lone surrogates, which JSON cannot express
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def input_messages(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Convert the input; consecutive items of the assistant are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Message] = []
    for item in given:
        _add(messages, item)
    return [{**message, "content": message.get("content", "")} for message in messages]


def continues_last(given: str | Sequence[Mapping[str, Any]]) -> bool:
    """True if the last item is an unfinished message of the assistant, as in vLLM."""
    last: Mapping[str, Any] = {} if isinstance(given, str) else given[-1]
    return (
        _item_type(last) == "message"
        and last.get("role") == "assistant"
        and last.get("status") in ("in_progress", "incomplete")
    )


def encoded_reasoning(text: str) -> str:
    return REASONING_PREFIX + base64.b64encode(text.encode("utf-8", "replace")).decode()


def _add(messages: list[Message], item: Mapping[str, Any]) -> None:
    match _item_type(item):
        case "message" if item.get("role") == "assistant":
            _extend(messages, "content", _joined(item.get("content")))
        case "message":
            messages.append({"role": _role(item), "content": _joined(item.get("content"))})
        case "reasoning":
            _extend(messages, "reasoning", _reasoning(item))
        case "function_call":
            _add_call(messages, item, _string(item, "arguments"))
        case "custom_tool_call":
            payload = {CUSTOM_INPUT: _string(item, "input")}
            _add_call(messages, item, json.dumps(payload, ensure_ascii=False))
        case "function_call_output" | "custom_tool_call_output":
            output = {
                "tool_call_id": _string(item, "call_id"),
                "content": _joined(item.get("output")),
            }
            messages.append({"role": "tool", **output})
        case kind:
            raise _wrong(
                f"items of type {str(kind)[:64]!r} are not supported: send messages, reasoning, "
                "and calls and outputs of functions and custom tools"
            )


def _item_type(item: Mapping[str, Any]) -> object:
    return item.get("type") or ("message" if "role" in item else None)


def _extend(messages: list[Message], field: str, text: str) -> None:
    """Set a field of the last message, or begin one if it is not of the assistant or has it."""
    if messages and messages[-1]["role"] == "assistant" and field not in messages[-1]:
        messages[-1][field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _add_call(messages: list[Message], item: Mapping[str, Any], arguments: str) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    call = _call(_string(item, "call_id"), _string(item, "name"), arguments)
    messages[-1].setdefault("tool_calls", []).append(call)


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _role(item: Mapping[str, Any]) -> str:
    role = item.get("role")
    if role not in ROLES:
        raise _wrong(f"the role of a message must be one of {', '.join(ROLES)}")
    return str(role)


def _joined(content: object) -> str:
    """Text of a message or of a tool's output; a refusal is text, too."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong("the content of an item must be text or a list of parts")
    return "".join(_part(part) for part in content)


def _part(part: object) -> str:
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
    raise _wrong("only parts of text are supported: remove images, files and other media")


def _reasoning(item: Mapping[str, Any]) -> str:
    """Text of a reasoning item: its content, our encrypted content, or its summary."""
    encrypted = item.get("encrypted_content")
    if content := item.get("content"):
        return _texts(content)
    if encrypted is not None:
        return _decoded_reasoning(encrypted)
    return _texts(item.get("summary") or [])


def _texts(parts: object) -> str:
    if not isinstance(parts, list):
        raise _wrong("content and summary of a reasoning item must be lists")
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if any(not isinstance(text, str) for text in texts):
        raise _wrong("the parts of a reasoning item must have a text")
    return "".join(map(str, texts))


def _decoded_reasoning(encrypted: object) -> str:
    if isinstance(encrypted, str) and encrypted.startswith(REASONING_PREFIX):
        try:
            return base64.b64decode(encrypted[len(REASONING_PREFIX) :], validate=True).decode()
        except ValueError:
            pass
    raise _wrong("encrypted_content of another server cannot be read: remove the reasoning item")


def _string(item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if isinstance(value, str):
        return value
    raise _wrong(f"{name} of an item of type {item.get('type')} must be a string")


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest.of_parameter("input", message)


def _wrong_tool(message: str) -> InvalidRequest:
    return InvalidRequest.of_parameter("tools", message)
