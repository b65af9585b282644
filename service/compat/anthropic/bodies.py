"""Request bodies of Anthropic's Messages API, and their conversion to chat requests."""

from typing import Annotated, Any, Literal

from pydantic import Field

from engine.types.chat import ChatRequest
from service.compat.anthropic.conversion import AnthropicMessage, Content, chat_messages
from service.compat.bodies import CompatModel, Flag, MaxTokens, Name, SamplingBody
from service.compat.chat.forced_tools import (
    FunctionName,
    NamedTool,
    ToolChoice,
    forced_constraint,
)
from service.compat.request import CommonRequestFields
from service.compat.sampling_fields import SamplingFields
from service.errors import InvalidRequest

_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}


class AnthropicTool(CompatModel):
    """Tool of the client; tools that Anthropic's API runs itself have another `type`."""

    name: Name
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Flag = False

    def to_template_tool(self) -> dict[str, Any]:
        if self.type not in (None, "custom"):
            raise _wrong_tool(
                f"type {self.type[:64]!r} is not supported: run the tool in the client"
            )
        if self.defer_loading:
            raise _wrong_tool("defer_loading is not supported: send the tools that are needed")
        if self.input_schema is None:
            raise _wrong_tool("input_schema is required")
        schema = self.input_schema if "type" in self.input_schema else self._object_schema()
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "parameters": schema,
        }
        if self.strict is not None:
            function["strict"] = self.strict
        return {
            "type": "function",
            "function": {k: v for k, v in function.items() if v is not None},
        }

    def _object_schema(self) -> dict[str, Any]:
        return {**(self.input_schema or {}), "type": "object"}


class AnthropicToolChoice(CompatModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: Flag = False


class Thinking(CompatModel):
    """Reasoning of the model; `budget_tokens` is not enforced, since `max_tokens` limits it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1024)] | None = None
    display: str | None = None


class OutputConfig(CompatModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class ConversationFields(SamplingBody):
    """Fields of a request that determine its prompt."""

    messages: Annotated[
        list[AnthropicMessage], Field(min_length=1, max_length=16384, fail_fast=True)
    ]
    system: Content | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat_request(self, *, merges_system: bool = False) -> ChatRequest:
        """Chat request that ends with the last message if that is of the assistant."""
        messages = chat_messages(self.system, self.messages, merges_system=merges_system)
        continues = self.messages[-1].role == "assistant"
        if continues:
            _check_continued(messages[-1])
        return ChatRequest(
            messages=messages,
            tools=self._template_tools(),
            template_options={**self.reasoning_options(), **(self.chat_template_kwargs or {})},
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )

    @property
    def has_inline_system(self) -> bool:
        return any(message.role == "system" for message in self.messages)

    def reasoning_options(self) -> dict[str, Any]:
        """Template options of `thinking` and `output_config`; a template may have only some."""
        effort = self.output_config and self.output_config.effort
        kind = self.thinking and self.thinking.type
        if kind == "disabled":
            return {"enable_thinking": False, "thinking": False}
        enabled = {"enable_thinking": True, "thinking": True} if kind == "enabled" else {}
        return {
            **enabled,
            **({"reasoning_effort": effort, "enable_thinking": True} if effort else {}),
        }

    def _template_tools(self) -> list[dict[str, Any]]:
        return [tool.to_template_tool() for tool in self.tools or ()]


class CountTokensBody(ConversationFields):
    """Request body of POST /v1/messages/count_tokens."""

    model: str | None = None


class MessagesBody(ConversationFields, SamplingFields, CommonRequestFields):
    """Request body of POST /v1/messages, with the sampling parameters of the other routes."""

    is_chat = True
    max_tokens: MaxTokens
    stop_sequences: Annotated[list[str], Field(max_length=64)] | None = None
    stream: Flag = False

    def check(self) -> None:
        if self.n != 1:
            raise InvalidRequest.of_parameter("n", "a message has one response: send n requests")
        budget = self.thinking and self.thinking.budget_tokens
        if budget and budget >= self.max_tokens:
            raise InvalidRequest.of_parameter(
                "thinking.budget_tokens", "must be less than max_tokens"
            )

    def openai_tool_choice(self) -> ToolChoice | None:
        """The tool choice as on the other chat routes."""
        if self.tool_choice is None:
            return None
        if self.tool_choice.type != "tool":
            return _CHOICES[self.tool_choice.type]
        if self.tool_choice.name is None:
            raise InvalidRequest.of_parameter("tool_choice", "the type tool needs a name")
        return NamedTool(function=FunctionName(name=self.tool_choice.name))

    @property
    def parallel_tool_calls(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    def _stop(self) -> list[str] | None:
        given = super()._stop()
        if self.stop_sequences is None:
            return given
        return [*(given or ()), *self.stop_sequences]

    def _constraints(self) -> dict[str, dict[str, Any] | None]:
        forced = forced_constraint(
            self.openai_tool_choice(), self._template_tools, parallel=self.parallel_tool_calls
        )
        output = self.output_config and self.output_config.format
        return {
            "tool_choice": forced,
            "output_config.format": _output_schema(output) if output else None,
            **super()._constraints(),
        }


def _check_continued(message: dict[str, Any]) -> None:
    if "tool_calls" in message:
        raise InvalidRequest.of_parameter(
            "messages", "the last message has tool_use blocks without tool_result blocks"
        )
    if not message["content"]:
        raise InvalidRequest.of_parameter(
            "messages", "the last message of the assistant has no text that the response continues"
        )


def _output_schema(given: dict[str, Any]) -> dict[str, Any]:
    match given:
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"json": schema}
    raise InvalidRequest.of_parameter(
        "output_config.format", "type must be json_schema, with a schema"
    )


def _wrong_tool(message: str) -> InvalidRequest:
    return InvalidRequest.of_parameter("tools", message)
