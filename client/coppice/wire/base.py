"""Base classes and shared field types of all request and answer models of the HTTP API."""

from typing import Annotated, Any

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapSerializer,
    WrapValidator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from coppice.wire.packed.requests import TOKEN_IDS, given_list, serialized_list


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


def _validate_token_ids(
    value: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo
) -> list[int]:
    """Validates a list of token ids, without a check of each in the ordinary case.

    pydantic takes 85 ms for a million ids, during which no other thread can run. Here each of the
    four checks takes 20 ms at most.
    """
    found = given_list(TOKEN_IDS, value, info)
    if isinstance(found, np.ndarray):
        is_valid = not len(found) or found.min() >= 0
        found = found.tolist()
    else:
        is_valid = isinstance(found, list) and set(map(type, found)) == {int}
        is_valid = is_valid and min(found) >= 0 and max(found) < MAX_TOKEN_ID
    token_ids: list[int] = list(found) if is_valid else validate(found)
    return token_ids


def _serialize_token_ids(
    value: Any, handler: SerializerFunctionWrapHandler, info: SerializationInfo
) -> Any:
    return serialized_list(TOKEN_IDS, value, handler, info)


MAX_TOKENS = 1_048_576
MAX_TOKEN_ID = 2**31
TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKEN_ID), JsonInteger()]
TokenIds = Annotated[
    list[TokenId],
    Field(fail_fast=True),
    WrapValidator(_validate_token_ids),
    WrapSerializer(_serialize_token_ids),
]
"""Validation stops at the first invalid id; listing a million errors would take too long."""
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Label of a weights version, chosen by the publisher; safe as a file name and in a URL."""
AdapterName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}(@[A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
]
"""LoRA adapter name for the adapter's current version, or `name@version` for a fixed one."""
AdapterLabel = Annotated[str | None, Field(exclude_if=lambda label: label is None)]
"""In answers: `name@version`; the field is absent if no adapter was used."""


ABSENT = Field(exclude_if=lambda value: value is None)
"""In answers: absent if there is no value."""
UNUSED = Field(exclude_if=lambda value: not value)
"""In requests: absent if false or empty, so that servers without the field accept the request."""


class RequestModel(BaseModel):
    """Base class of request bodies. Unknown fields are errors, so that typos are noticed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AnswerModel(BaseModel):
    """Base class of response bodies. Unknown fields are ignored: newer servers may add some."""

    model_config = ConfigDict(extra="ignore", frozen=True)
