"""Wrapper of vLLM's parsers of tool calls and reasoning in responses."""

import uuid
from collections.abc import Sequence
from typing import Any

from vllm.parser.parser_manager import ParserManager

from engine.errors import StartFailed
from engine.settings import EngineSettings
from engine.types.chat import ToolCall, ToolCallPart

STREAMING_TOOL_PARSERS = frozenset(
    {"hermes", "qwen3_json", "qwen3_coder", "qwen3_xml", "glm45", "glm47"}
)
"""Tool parsers whose parts, joined, are the calls of the whole response.

`tests/compat/test_tool_call_streams.py` compares them. With other parsers, tool calls are returned
at the end of a response.
"""


def response_parser(tokenizer: Any, settings: EngineSettings) -> Any:
    try:
        return ParserManager.get_parser(
            tool_parser_name=settings.tool_parser,
            reasoning_parser_name=settings.reasoning_parser,
            enable_auto_tools=settings.tool_parser is not None,
            model_name=settings.model,
            tokenizer=tokenizer,
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StartFailed(
            f"engine.tool_parser or engine.reasoning_parser cannot be used: {error}"
        ) from error


def num_reasoning_tokens(parser: Any, token_ids: Sequence[int]) -> int:
    """Number of reasoning tokens of a response that has reasoning, without its marks.

    If the prompt has begun the reasoning, the mark of its beginning is not in the response.
    """
    number = parser.count_reasoning_tokens(list(token_ids))
    start = getattr(parser.reasoning_parser, "start_token_id", None)
    if number or start is None or start in token_ids:
        return int(number)
    return int(parser.count_reasoning_tokens([start, *token_ids]))


def tool_calls(calls: Any) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            id=call.id or f"call_{uuid.uuid4().hex}",
            name=_encodable(call.name),
            arguments=_encodable(call.arguments),
        )
        for call in calls or ()
    )


def tool_call_part(call: Any) -> ToolCallPart:
    """Part of a tool call from vLLM's `DeltaToolCall`."""
    function = call.function
    name = function and function.name
    return ToolCallPart(
        index=call.index,
        id=call.id,
        name=name and _encodable(name),
        arguments=_encodable((function and function.arguments) or ""),
    )


def _encodable(text: str) -> str:
    """The text with U+FFFD for the lone surrogates that parsers decode from a call's JSON."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
