"""Data types of the engine interface for chat: requests, tool calls, responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

TruncationSide = Literal["left", "right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """Chat messages in OpenAI's format.

    Only the `template_options` listed in `EngineInfo.template_variables` are rendered; others are
    ignored. With `continue_final_message` the prompt ends with the last message, which the response
    goes on with. With `truncate_prompt_tokens` only that many tokens are kept (`truncated`).
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide = "left"


def truncated(token_ids: list[int], number: int | None, side: TruncationSide) -> list[int]:
    """Last `number` tokens of a prompt, or the first ones if the right side is truncated."""
    if number is None or number >= len(token_ids):
        return token_ids
    return token_ids[-number:] if side == "left" else token_ids[:number]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call in a response. `arguments` is the JSON text that the model generated."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallPart:
    """Text that a part of a response adds to its tool call of this index.

    The first part of a call has its id and its name; `is_whole` if it has all arguments, too.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None
    is_whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponse:
    """A chat response, split into content, reasoning and tool calls.

    `parsed` is false if a parser failed; then the whole text is the content. Of a part of a
    response, content and reasoning are the text that the part adds, and `tool_call_parts` what it
    adds to tool calls. `num_reasoning_tokens` is that of a whole response.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_parts: tuple[ToolCallPart, ...] = ()
    num_reasoning_tokens: int = 0
    parsed: bool = True
