"""Base models of the request bodies of other servers' APIs; unsupported fields are refused.

These clients send more fields than are needed. Fields without effect are accepted, and all other
fields that a route does not serve are refused (service/compat/unsupported_fields.py).
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from coppice.wire.base import MAX_TOKENS, TokenIds
from coppice.wire.rollouts import MAX_GROUPS
from engine.types.chat import TruncationSide
from engine.types.info import EngineInfo
from service.compat.unsupported_fields import INTERNAL_FIELDS, REFUSED, Refused, check_field
from service.errors import InvalidRequest
from service.observability.metrics import Metrics
from service.server import Server

SCHEMA_REFERENCE = "#/components/schemas/{model}"
MAX_EXTRA_FIELDS = 64
BODY_MODELS: dict[str, type[BaseModel]] = {}
"""Models of the routes' bodies by name, for the OpenAPI document."""

Text = Annotated[str, Field(min_length=1, max_length=16 * 2**20)]
# Pydantic tries every member of a union; without fail_fast each collects an error per element.
Texts = Annotated[list[Text], Field(max_length=MAX_GROUPS, fail_fast=True)]
ListsOfTokenIds = Annotated[list[TokenIds], Field(max_length=MAX_GROUPS, fail_fast=True)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Directory = Annotated[str, Field(min_length=1, max_length=4096)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Flag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
"""Boolean field with default false that upstream declares as `bool | None`."""
TrueUnlessNull = Annotated[bool, BeforeValidator(lambda value: True if value is None else value)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class CompatModel(BaseModel):
    """Pydantic model of a request body that keeps unknown fields, for `check_extra_fields`."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    refused: ClassVar[Mapping[str, Refused]] = {}
    """Fields that this body refuses, unlike others (see unsupported_fields)."""


class SamplingBody(CompatModel):
    """Request body, or a part of it, whose unknown fields are refused (see unsupported_fields)."""


class PromptTruncation(CompatModel):
    """Request fields that truncate a prompt, as in vLLM; -1 keeps what fits the context."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    truncation_side: TruncationSide | None = None

    def prompt_tokens_to_keep(self, info: EngineInfo) -> int | None:
        number = self.truncate_prompt_tokens
        if number == 0 or (number or 0) > info.max_context_tokens:
            raise InvalidRequest.of_parameter(
                "truncate_prompt_tokens", f"must be -1, or 1 to {info.max_context_tokens}"
            )
        return info.max_context_tokens - 1 if number == -1 else number


Body = TypeVar("Body", bound=CompatModel)


class EmptyBody(CompatModel):
    """Request body of a route that ignores all fields."""


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI declaration of a route's request body, for the route's argument `openapi_extra`.

    FastAPI does not know the body models, since the routes parse their bodies themselves.
    """
    BODY_MODELS[model.__name__] = model
    schema = {"$ref": SCHEMA_REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


async def read_compat_body(
    request: Request, model: type[Body], server: Server, *, limit: int | None = None
) -> Body:
    body = await server.bodies.read_json(request, model, limit=limit)
    check_extra_fields(body, server.metrics)
    return body


def check_extra_fields(body: CompatModel, metrics: Metrics) -> None:
    """Check the fields of a body that its model does not have, and count those without effect.

    Unknown fields of a nested object, such as a message, are counted only: clients send back what
    they have received from other servers.
    """
    for nested in _nested_models(body):
        is_strict = isinstance(nested, SamplingBody)
        for name, value in (nested.model_extra or {}).items():
            if name == "extra_body" and _is_repeated(value, nested):
                continue
            if is_strict or name in REFUSED:
                check_field(name, value, nested.refused)
            if value is None or name in REFUSED or (is_strict and name not in INTERNAL_FIELDS):
                continue
            kind = "dropped" if name in INTERNAL_FIELDS else "unknown"
            metrics.http.compat_fields.labels(kind).inc()


def _is_repeated(extra_body: object, body: CompatModel) -> bool:
    """True if the body has the fields of its `extra_body`, too, as in requests of rLLM's gateway.

    Compares only a few values of constant size, because this runs on the event loop.
    """
    if not isinstance(extra_body, dict) or len(extra_body) > MAX_EXTRA_FIELDS:
        return False
    return all(
        isinstance(value, bool | int | float)
        and name in body.model_fields_set
        and value == getattr(body, name)
        for name, value in extra_body.items()
    )


def _nested_models(value: object) -> Iterator[CompatModel]:
    if isinstance(value, CompatModel):
        yield value
        for name in type(value).model_fields:
            yield from _nested_models(getattr(value, name))
    elif isinstance(value, list) and value and isinstance(value[0], CompatModel):
        for item in value:
            yield from _nested_models(item)


def effort_options(effort: ReasoningEffort | None) -> dict[str, Any]:
    """Template options of a reasoning effort, as in vLLM; a template may have only one."""
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}
