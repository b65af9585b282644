"""Validation of `tool_choice` in chat requests."""

from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError


def _free(value: object) -> object:
    if value in (None, "auto", "none"):
        return value
    raise PydanticCustomError(
        "tool_choice",
        "auto or none: a call that is forced needs guided decoding, and then the samples would "
        "not be the model's own; use auto, and read tool_calls",
    )


ToolChoice = Annotated[Literal["auto", "none"] | None, BeforeValidator(_free)]
