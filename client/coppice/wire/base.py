"""What every wire type shares: requests refuse what they do not know, answers tolerate it."""

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema


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


def _validate_in_slices(value: Any, validate: ValidatorFunctionWrapHandler) -> list[int]:
    """pydantic holds the GIL until it calls a Python function: other threads run in between."""
    if not isinstance(value, list) or len(value) <= SLICE_TOKENS:
        token_ids: list[int] = validate(value)
        return token_ids
    token_ids = []
    for start in range(0, len(value), SLICE_TOKENS):
        try:
            token_ids += validate(value[start : start + SLICE_TOKENS])
        except ValidationError as error:
            raise _with_index(error, start) from None
    return token_ids


def _with_index(error: ValidationError, start: int) -> ValidationError:
    """The error of a slice, with the index that its element has in the whole list."""
    (found,) = error.errors()
    index, *inner = found["loc"]
    assert isinstance(index, int)
    details = InitErrorDetails(
        type=PydanticCustomError(found["type"], "{message}", {"message": found["msg"]}),
        loc=(start + index, *inner),
        input=found["input"],
    )
    return ValidationError.from_exception_data(error.title, [details])


SLICE_TOKENS = 2**14
TokenId = Annotated[int, Field(ge=0, lt=2**31), JsonInteger()]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), WrapValidator(_validate_in_slices)]
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
