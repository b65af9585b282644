"""Base models for the request bodies of clients written for vLLM, SGLang or OpenAI.

These clients send more fields than are needed. Unknown fields are ignored and counted. Fields that
would change the samples are rejected (service/compat/unsupported.py). Fields that would reach into
the engine are dropped.
"""

from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from coppice.wire.base import MAX_TOKENS, TokenIds
from coppice.wire.rollouts import MAX_GROUPS, MAX_SAMPLES_PER_GROUP
from coppice.wire.sampling import Sampling
from service.compat import unsupported
from service.observability.metrics import Metrics
from service.server import Server

# These fields control engine internals. They are for the engine's operator, not for callers.
IGNORED_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params", "vllm_xargs", "extra_args"})

SCHEMA_REFERENCE = "#/components/schemas/{model}"
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
NumSamples = Annotated[
    int,
    Field(ge=1, le=MAX_SAMPLES_PER_GROUP),
    BeforeValidator(lambda value: 1 if value is None else value),
]
Flag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
"""Boolean field with default false that upstream declares as `bool | None`."""


class CompatModel(BaseModel):
    """Pydantic model of a request body that keeps unknown fields, for `check_extra_fields`."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())


Body = TypeVar("Body", bound=CompatModel)


class EmptyBody(CompatModel):
    """Request body of a route that ignores all fields."""


class SamplingFields(CompatModel):
    """Sampling parameters that have the same names in all APIs, unlike the token limit."""

    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=256)] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    n: NumSamples = 1

    def sampling(self, max_tokens: int | None) -> Sampling:
        """Convert to native sampling parameters; `top_k` -1 and 0 both disable top-k."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=self.ignore_eos,
        )


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
    for nested in _nested_models(body):
        for name, value in (nested.model_extra or {}).items():
            if value is None or unsupported.check_param(name, value):
                continue
            metrics.http.compat_fields.labels(
                "dropped" if name in IGNORED_FIELDS else "unknown"
            ).inc()


def _nested_models(value: object) -> Iterator[CompatModel]:
    if isinstance(value, CompatModel):
        yield value
        for name in type(value).model_fields:
            yield from _nested_models(getattr(value, name))
    elif isinstance(value, list) and value and isinstance(value[0], CompatModel):
        for item in value:
            yield from _nested_models(item)
