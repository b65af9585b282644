"""Request bodies of clients written for other servers.

These clients send more fields than are needed. Unknown fields are ignored and counted. Fields that
would change the samples are rejected (service/compat/unsupported_params.py). Fields that would
reach into the engine are dropped.
"""

from collections.abc import Iterator
from typing import Annotated, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from coppice.wire.base import TokenIds
from coppice.wire.rollouts import MAX_GROUPS
from service.compat import unsupported_params
from service.observability.metrics import Metrics
from service.server import Server

# These fields control engine internals. They are for the engine's operator, not for callers.
IGNORED_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params", "vllm_xargs", "extra_args"})

Text = Annotated[str, Field(min_length=1, max_length=16 * 2**20)]
# Pydantic tries every member of a union; without fail_fast each collects an error per element.
Texts = Annotated[list[Text], Field(max_length=MAX_GROUPS, fail_fast=True)]
ListsOfTokenIds = Annotated[list[TokenIds], Field(max_length=MAX_GROUPS, fail_fast=True)]


class CompatModel(BaseModel):
    """Model of a request body that keeps unknown fields for `check_extra_fields`."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


Body = TypeVar("Body", bound=CompatModel)

Flag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
"""Boolean field with default false that upstream declares as `bool | None`."""


async def read_compat_body(
    request: Request, model: type[Body], server: Server, *, limit: int | None = None
) -> Body:
    body = await server.bodies.read_json(request, model, limit=limit)
    check_extra_fields(body, server.metrics)
    return body


def check_extra_fields(body: CompatModel, metrics: Metrics) -> None:
    for nested in _nested_models(body):
        for name, value in (nested.model_extra or {}).items():
            if value is None or unsupported_params.check(name, value):
                continue
            metrics.compat_fields.labels("dropped" if name in IGNORED_FIELDS else "unknown").inc()


def _nested_models(value: object) -> Iterator[CompatModel]:
    if isinstance(value, CompatModel):
        yield value
        for name in type(value).model_fields:
            yield from _nested_models(getattr(value, name))
    elif isinstance(value, list) and value and isinstance(value[0], CompatModel):
        for item in value:
            yield from _nested_models(item)
