"""OpenAPI document of the sub-application, generated from its routes and body models."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from service import __version__

_REFERENCE = "#/components/schemas/{model}"
_BODY_MODELS: dict[str, type[BaseModel]] = {}


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """Request body declaration for a route's `openapi_extra=`.

    FastAPI does not know the body models, since the routes parse their bodies themselves.
    """
    _BODY_MODELS[model.__name__] = model
    schema = {"$ref": _REFERENCE.format(model=model.__name__)}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


def build_openapi(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    own_routes = [route for route in routes if isinstance(route, APIRoute)]
    openapi = get_openapi(
        title="Coppice for clients of others", version=__version__, routes=own_routes
    )
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (_BODY_MODELS[name], "validation") for name in sorted(set(_body_models(own_routes)))
    ]
    _, schemas = models_json_schema(models, ref_template=_REFERENCE)
    openapi["components"] = {"schemas": schemas.get("$defs", {})}
    for operations in openapi["paths"].values():
        _drop_fastapi_validation(operations)
    return openapi


def _drop_fastapi_validation(operations: dict[str, Any]) -> None:
    """Remove FastAPI's own 422 response from routes with parameters.

    FastAPI's validation never fails on these routes.
    """
    for operation in operations.values():
        responses = operation["responses"]
        if "application/json" in responses.get("422", {}).get("content", {}):
            del responses["422"]


def _body_models(routes: Sequence[APIRoute]) -> Iterator[str]:
    for route in routes:
        if route.openapi_extra is not None:
            content = route.openapi_extra["requestBody"]["content"]
            yield content["application/json"]["schema"]["$ref"].rpartition("/")[2]
