"""Tool calls forced by `tool_choice`: constraint of the sampling, and parsing of the result.

As in vLLM, the text of a required call is a JSON list of objects with `name` and `parameters`, and
that of a named one the parameters alone. The format does not depend on the model's own.
"""

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from coppice.wire.base import RequestModel
from engine.types.chat import ChatResponse, ToolCall
from service.compat.bodies import CompatModel, Name
from service.errors import InvalidRequest

EMPTY_OBJECT: dict[str, Any] = {"type": "object", "properties": {}}
Tools = Sequence[Mapping[str, Any]]


class FunctionName(CompatModel):
    name: Name


class NamedTool(CompatModel):
    """The one function that a response must call."""

    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice = Literal["auto", "none", "required"] | NamedTool


class _Call(RequestModel):
    name: str
    parameters: dict[str, Any]


_CALLS: TypeAdapter[list[_Call]] = TypeAdapter(Annotated[list[_Call], Field(min_length=1)])


def is_forced(choice: ToolChoice | None) -> bool:
    return choice == "required" or isinstance(choice, NamedTool)


def forced_constraint(
    choice: ToolChoice | None, tools: Callable[[], Tools], *, parallel: bool
) -> dict[str, Any] | None:
    """Native `structured_outputs` of a forced call, or of several if `parallel`."""
    if not is_forced(choice):
        return None
    schemas = {tool["function"]["name"]: _schema(tool) for tool in tools()}
    if isinstance(choice, NamedTool):
        if choice.function.name not in schemas:
            raise InvalidRequest.of_parameter("tool_choice", "the function is not in tools")
        return {"json": schemas[choice.function.name]}
    if not schemas:
        raise InvalidRequest.of_parameter("tool_choice", "required needs tools")
    calls = [_call_schema(name, schema) for name, schema in schemas.items()]
    limits = {"minItems": 1} if parallel else {"minItems": 1, "maxItems": 1}
    return {"json": {"type": "array", **limits, "items": {"anyOf": calls}}}


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or EMPTY_OBJECT


def _call_schema(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def forced_response(choice: ToolChoice | None, text: str) -> ChatResponse:
    """The response with the forced calls in its text.

    A text that was cut short is content, as is one that Python cannot parse: integers of more than
    4300 digits and deep nesting satisfy the constraint.
    """
    try:
        calls = _calls(choice, text)
    except (ValueError, RecursionError):
        return ChatResponse(content=text, parsed=False)
    return ChatResponse(content=None, tool_calls=calls)


def _calls(choice: ToolChoice | None, text: str) -> tuple[ToolCall, ...]:
    if isinstance(choice, NamedTool):
        json.loads(text)
        return (_call(choice.function.name, text),)
    return tuple(
        _call(call.name, json.dumps(call.parameters, ensure_ascii=False))
        for call in _CALLS.validate_json(text)
    )


def _call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id=f"call_{uuid.uuid4().hex}", name=name, arguments=arguments)
