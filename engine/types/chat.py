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


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Tokens of a prompt. `multimodal_input` is the engine's input of one with images.

    Each image counts with at least a minimum of pixels.
    """

    token_ids: list[int]
    multimodal_input: Any = None
    num_pixels: int = 0


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
class ChatResponse:
    """A chat response, split into content, reasoning and tool calls.

    `parsed` is false if a parser failed; then the whole text is the content.
    """

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    parsed: bool = True
