"""Bodies of clients that were written for other servers.

They send more than is needed, so what nobody here knows is ignored and counted. What would change
the samples is refused (service/compat/unsupported_params.py); what would reach into the engine is
dropped.
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

# Keys to the insides of an engine: for its own operator, not for whoever may ask for samples.
IGNORED_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params", "vllm_xargs", "extra_args"})

Text = Annotated[str, Field(min_length=1, max_length=16 * 2**20)]
# Of a union every member is tried: without fail_fast each collects an error per element.
Texts = Annotated[list[Text], Field(max_length=MAX_GROUPS, fail_fast=True)]
ListsOfTokenIds = Annotated[list[TokenIds], Field(max_length=MAX_GROUPS, fail_fast=True)]


class CompatModel(BaseModel):
    """Part of a body; what it does not name is kept apart until `check_extra_fields` has judged
    it."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


Body = TypeVar("Body", bound=CompatModel)

Flag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
"""A field that is false by default, and that upstream declares as `bool | None`."""


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
