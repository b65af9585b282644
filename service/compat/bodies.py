"""Base model and field types of the request bodies of other servers' APIs."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

SCHEMA_REFERENCE = "#/components/schemas/{model}"
BODY_MODELS: dict[str, type[BaseModel]] = {}
"""Models of the routes' bodies by name, for the OpenAPI document."""

Name = Annotated[str, Field(min_length=1, max_length=256)]
Directory = Annotated[str, Field(min_length=1, max_length=4096)]
Flag = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]
"""Boolean field with default false that upstream declares as `bool | None`."""


class CompatModel(BaseModel):
    """Pydantic model of a request body whose unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class EmptyBody(CompatModel):
    """Request body of a route that ignores all fields."""


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI declaration of a route's request body, for the route's argument `openapi_extra`.

    FastAPI does not know the body models, since the routes parse their bodies themselves.
    """
    BODY_MODELS[model.__name__] = model
    return body_reference(model.__name__)


def body_reference(name: str) -> dict[str, Any]:
    schema = {"$ref": SCHEMA_REFERENCE.format(model=name)}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}
