"""Request body of OpenAI's Responses API, and its conversion to a chat request."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from engine.types.chat import ChatRequest
from service.compat.bodies import (
    CompatModel,
    Flag,
    MaxTokens,
    Name,
    ReasoningEffort,
    TrueUnlessNull,
    effort_options,
)
from service.compat.chat.forced_tools import (
    FunctionName,
    NamedTool,
    ToolChoice,
    forced_constraint,
)
from service.compat.logprobs import NumLogprobs
from service.compat.request import CommonRequestFields
from service.compat.responses.items import (
    Items,
    Message,
    ResponseTool,
    ToolName,
    continues_last,
    input_messages,
)
from service.compat.sampling_fields import SamplingFields
from service.compat.unsupported_fields import RESPONSES_REFUSED, Refused
from service.errors import InvalidRequest

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
Include = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    # Of items that no response has.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class Reasoning(CompatModel):
    """Options of reasoning; its text is returned, so summaries are not made."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseText(CompatModel):
    format: dict[str, Any] | None = None


class ResponsesBody(SamplingFields, CommonRequestFields):
    """Request body of POST /v1/responses, with the sampling parameters of the other routes."""

    is_chat = True
    refused: ClassVar[Mapping[str, Refused]] = RESPONSES_REFUSED

    input: str | Items
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: TrueUnlessNull = True
    max_output_tokens: MaxTokens | None = None
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolName | None = None
    parallel_tool_calls: TrueUnlessNull = True
    reasoning: Reasoning | None = None
    text: ResponseText | None = None
    top_logprobs: NumLogprobs | None = None
    stream: Flag = False
    stream_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat_request(self, previous: Sequence[Message]) -> ChatRequest:
        """Chat request of the input after the `previous` messages of its conversation."""
        system = {"role": "system", "content": self.instructions}
        continues = continues_last(self.input)
        return ChatRequest(
            messages=[
                *([system] if self.instructions else []),
                *previous,
                *input_messages(self.input),
            ],
            tools=self._template_tools(),
            template_options={**self.reasoning_options(), **(self.chat_template_kwargs or {})},
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )

    def check(self) -> None:
        if self.n != 1:
            raise InvalidRequest.of_parameter("n", "there is one response: send n requests")

    def openai_tool_choice(self) -> ToolChoice | None:
        """The tool choice as on the other chat routes."""
        if isinstance(self.tool_choice, ToolName):
            return NamedTool(function=FunctionName(name=self.tool_choice.name))
        return self.tool_choice

    def includes(self, name: str) -> bool:
        return name in (self.include or ())

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the tools whose input is text."""
        custom = [tool for tool in self.tools or () if tool.type == "custom"]
        return frozenset(tool.name for tool in custom if tool.name)

    def reasoning_options(self) -> dict[str, Any]:
        """Template options of the reasoning effort."""
        return effort_options(self.reasoning.effort if self.reasoning else None)

    def _template_tools(self) -> list[dict[str, Any]]:
        return [tool.to_template_tool() for tool in self.tools or ()]

    def _constraints(self) -> dict[str, dict[str, Any] | None]:
        forced = forced_constraint(
            self.openai_tool_choice(), self._template_tools, parallel=self.parallel_tool_calls
        )
        output = _text_format(self.text.format) if self.text and self.text.format else None
        return {"tool_choice": forced, "text.format": output, **super()._constraints()}


def _text_format(given: dict[str, Any]) -> dict[str, Any] | None:
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "schema": dict(schema)}:
            return {"json": schema}
    raise InvalidRequest.of_parameter(
        "text.format", "type must be text, json_object, or json_schema with a schema"
    )
