"""Wire types of chat prompts: messages and tools in OpenAI's format."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from coppice.wire.base import AnswerModel, RequestModel

MAX_CHARS = 16 * 2**20
Name = Annotated[str, Field(min_length=1, max_length=256)]
Chars = Annotated[str, Field(max_length=MAX_CHARS)]


class TextPart(RequestModel):
    """Part of a message's content."""

    type: Literal["text"] = "text"
    text: Chars


class ImageUrl(RequestModel):
    """Address of an image: `data:image/png;base64,` and its bytes."""

    url: Chars


class ImagePart(RequestModel):
    """Image in a message's content, for models that read images."""

    type: Literal["image_url"]
    image_url: ImageUrl


class CalledFunction(RequestModel):
    """Function that a message calls; `arguments` is the text of a JSON object."""

    name: Name
    arguments: Annotated[str, Field(max_length=2**20)]


class MessageToolCall(RequestModel):
    """Tool call in a message of the assistant."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


ContentPart = TextPart | ImagePart


class Message(RequestModel):
    """One chat message, rendered by the model's chat template."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Chars | Annotated[list[ContentPart], Field(max_length=1024)] | None = None
    name: Name | None = None
    reasoning: Chars | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=256)] | None = None
    tool_call_id: Name | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.content is None and self.tool_calls is None and self.reasoning is None:
            raise ValueError("a message needs content, reasoning or tool_calls")
        return self

    def to_template_message(self) -> dict[str, Any]:
        """Message as a dict for the chat template, its text parts joined unless it has images."""
        fields = self.model_dump(exclude_none=True)
        if self.num_images:
            return fields
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content if isinstance(part, TextPart))
        return {**fields, "content": content or ""}

    @property
    def num_images(self) -> int:
        content = self.content
        parts = content if isinstance(content, list) else ()
        return sum(isinstance(part, ImagePart) for part in parts)


class ToolFunction(RequestModel):
    """Function of a tool; `parameters` is a JSON schema that the chat template renders."""

    name: Name
    description: Chars | None = None
    parameters: dict[str, Any] | None = None


class Tool(RequestModel):
    """Tool that the model may call."""

    type: Literal["function"] = "function"
    function: ToolFunction

    def to_template_tool(self) -> dict[str, Any]:
        """Tool as a dict for the chat template, with the given schema and not a copy."""
        function = self.function.model_dump(exclude_none=True, exclude={"parameters"})
        if self.function.parameters is not None:
            function["parameters"] = self.function.parameters
        return {"type": self.type, "function": function}


class ParsedToolCall(AnswerModel):
    """Tool call in a response; `arguments` is the JSON text that the model generated."""

    id: str
    name: str
    arguments: str


class ParsedMessage(AnswerModel):
    """Response, split by the server's tool and reasoning parsers.

    If a parser failed, `parsed` is false and the content is the whole text.
    """

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ParsedToolCall] = []
    parsed: bool = True
