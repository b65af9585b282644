"""FastAPI app with the routes of other servers' APIs; serves all paths without a native route."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.routing import BaseRoute

from service import __version__
from service.auth.access import authorize, declared_access, public
from service.compat import agent_routes, model_and_adapter_routes, unsupported_routes
from service.compat.anthropic import routes as anthropic
from service.compat.bodies import BODY_MODELS, SCHEMA_REFERENCE
from service.compat.openai import chat, completions
from service.compat.openai_errors import to_openai_json
from service.compat.responses import routes as responses
from service.compat.sglang import control as sglang_control
from service.compat.sglang import generate as sglang_generate
from service.compat.vllm import control as vllm_control
from service.compat.vllm import tokens as vllm_tokens
from service.config.settings import CompatApi
from service.http import exception_handlers

OPENAPI_PATH = "/compat/openapi.json"

RouteAudience = Literal["everybody", "callers", "operators"]

OPENAI = (
    model_and_adapter_routes.openai,
    completions.router,
    chat.router,
    responses.router,
    unsupported_routes.openai,
)
ROUTERS: dict[CompatApi, Sequence[APIRouter]] = {
    "openai": OPENAI,
    "anthropic": (anthropic.router,),
    "vllm": (
        *(
            *OPENAI,
            model_and_adapter_routes.router,
            vllm_tokens.generation,
            vllm_tokens.tokenization,
        ),
        *(anthropic.router, vllm_control.router, unsupported_routes.vllm, unsupported_routes.skyrl),
    ),
    "sglang": (
        *(*OPENAI, model_and_adapter_routes.router, sglang_generate.router),
        *(sglang_control.router, unsupported_routes.sglang),
    ),
}


def create_compat_app(
    shapes: Sequence[CompatApi], audience: RouteAudience = "everybody"
) -> FastAPI:
    """Create the FastAPI app with the routes of the given APIs (vLLM, SGLang, OpenAI).

    It also has the routes of agents' sessions. A route that two of the APIs share occurs once. The
    audience "operators" selects the routes that require the role admin, "callers" the others.
    """
    app = FastAPI(
        dependencies=[Depends(authorize)],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    exception_handlers.install(app, exception_handlers.ProblemFormat(to_openai_json))
    app.router.routes = [route for route in _routes(tuple(shapes)) if _serves(audience, route)]
    _add_openapi_route(app)
    return app


@cache
def _routes(shapes: tuple[CompatApi, ...]) -> Sequence[BaseRoute]:
    """Routes of agents' sessions and of the given APIs, shared by all apps.

    Apps can share them, because a route gets its server from the request.
    """
    selected = [agent_routes.router, *(r for shape in shapes for r in ROUTERS[shape])]
    combined = APIRouter(dependencies=[Depends(authorize)])
    for router in {id(router): router for router in selected}.values():
        combined.include_router(router)
    return combined.routes


def _serves(audience: RouteAudience, route: BaseRoute) -> bool:
    assert isinstance(route, APIRoute), "these shapes have no other routes"
    access = declared_access(route.endpoint)
    is_admin = access is not None and access.role == "admin"
    return audience == "everybody" or is_admin == (audience == "operators")


def _add_openapi_route(app: FastAPI) -> None:
    """Add the route of the OpenAPI document, which is generated at the first request.

    The document is rarely requested, and generating it takes most of the time that the app needs to
    start.
    """
    content = cache(lambda: to_json(_build_openapi(app.routes)))

    @app.get(OPENAPI_PATH, include_in_schema=False)
    @public
    async def openapi() -> Response:
        return Response(content(), media_type="application/json")


def _build_openapi(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    own_routes = [route for route in routes if isinstance(route, APIRoute)]
    openapi = get_openapi(
        title="Coppice: APIs of other servers", version=__version__, routes=own_routes
    )
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (BODY_MODELS[name], "validation") for name in sorted(set(_body_models(own_routes)))
    ]
    _, schemas = models_json_schema(models, ref_template=SCHEMA_REFERENCE)
    openapi["components"] = {"schemas": schemas.get("$defs", {})}
    for operations in openapi["paths"].values():
        _drop_fastapi_validation(operations)
    return openapi


def _drop_fastapi_validation(operations: dict[str, Any]) -> None:
    """Remove from an OpenAPI path the 422 response that FastAPI adds for its own validation.

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
