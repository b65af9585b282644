"""Base types of the wire format: requests reject unknown fields, answers ignore them."""

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
    """Integer as in JSON Schema, where 56.0 is an integer; pydantic's strict mode rejects it.

    It must be the last annotation of an `int`, after its bounds.
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
    """Validates a list of token ids in slices, between which other threads can run.

    Within a slice pydantic holds the GIL.
    """
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
    """Validation error with the index in the whole list instead of the index in a slice."""
    (found,) = error.errors()
    index, *inner = found["loc"]
    assert isinstance(index, int)
    details = InitErrorDetails(
        type=PydanticCustomError(found["type"], "{message}", {"message": found["msg"]}),
        loc=(start + index, *inner),
        input=found["input"],
    )
    return ValidationError.from_exception_data(error.title, [details])


MAX_TOKENS = 1_048_576
SLICE_TOKENS = 2**14
TokenId = Annotated[int, Field(ge=0, lt=2**31), JsonInteger()]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), WrapValidator(_validate_in_slices)]
"""Validation stops at the first invalid id; listing a million errors would take too long."""
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Label of a weights version, chosen by the publisher; safe as a file name and in a URL."""
AdapterName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
]
"""LoRA adapter name for the adapter's current version, or `name@version` for a fixed one."""
AdapterLabel = Annotated[str | None, Field(exclude_if=lambda label: label is None)]
"""In answers: `name@version`; the field is absent if no adapter was used."""


class RequestModel(BaseModel):
    """Base class of request bodies. Unknown fields are errors, so that typos are noticed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AnswerModel(BaseModel):
    """Base class of response bodies. Unknown fields are ignored: newer servers may add some."""

    model_config = ConfigDict(extra="ignore", frozen=True)
