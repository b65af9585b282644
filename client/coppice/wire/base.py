"""What every wire type shares: requests refuse what they do not know, answers tolerate it."""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


class JsonInteger:
    """The integer type of JSON Schema, to which 56.0 is an integer; strict pydantic refuses it.

    It is the last annotation of an `int`, behind its bounds.
    """

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        integer: Any = handler(source)
        whole = core_schema.chain_schema(
            [
                core_schema.float_schema(strict=True, allow_inf_nan=False),
                {**integer, "strict": False},
            ]
        )
        return core_schema.union_schema(
            [integer, whole],
            mode="left_to_right",
            custom_error_type="integer",
            custom_error_message=_requirement(integer),
        )

    def __get_pydantic_json_schema__(
        self, schema: Any, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(schema["choices"][0])


def _requirement(integer: CoreSchema) -> str:
    names = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    bounds = [f"{text} {integer[bound]}" for bound, text in names.items() if bound in integer]
    return f"Input should be an integer {' and '.join(bounds)}".rstrip()


def _unchanged(value: list[int]) -> list[int]:
    return value


ThreadSwitch = AfterValidator(_unchanged)
"""Lets another thread run: pydantic holds the GIL until it calls a Python function."""

TokenId = Annotated[int, Field(ge=0, lt=2**31), JsonInteger()]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""The first wrong one is named; a million would take longer to list than to refuse."""
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""A weights version as its publisher names it: safe as a file name and in a URL."""
AdapterName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
]
"""An adapter's name, for its current version, or `name@version`, for no other."""
AdapterLabel = Annotated[str | None, Field(exclude_if=lambda label: label is None)]
"""In answers: `name@version`, or nothing where no adapter was."""


class RequestModel(BaseModel):
    """A body that a caller sends. A misspelt sampling field must fail, not change the training."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AnswerModel(BaseModel):
    """A body that the server sends. Newer servers may add fields."""

    model_config = ConfigDict(extra="ignore", frozen=True)
