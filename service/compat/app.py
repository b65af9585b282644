"""FastAPI app with the routes of other servers' APIs; serves all paths without a native route."""

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.routing import BaseRoute

from engine.protocol.openai_server import OpenAIServer
from service import __version__
from service.auth.access import authorize, declared_access, public
from service.compat import agent_routes, model_and_adapter_routes, unsupported_routes
from service.compat.bodies import BODY_MODELS, SCHEMA_REFERENCE
from service.compat.errors import to_openai_json
from service.compat.serving import routes as serving
from service.compat.sglang import control as sglang_control
from service.compat.sglang import generate as sglang_generate
from service.compat.vllm import control as vllm_control
from service.config.settings import CompatApi
from service.http import exception_handlers
from service.routes.dependencies import ReadyServer

OPENAPI_PATH = "/compat/openapi.json"

RouteAudience = Literal["everybody", "callers", "operators"]

OPENAI = (model_and_adapter_routes.openai, serving.openai)
ROUTERS: dict[CompatApi, Sequence[APIRouter]] = {
    "openai": OPENAI,
    "anthropic": (serving.anthropic,),
    "vllm": (
        *(*OPENAI, model_and_adapter_routes.router, serving.vllm, serving.anthropic),
        *(vllm_control.router, unsupported_routes.vllm),
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

    The document is rarely requested, and generating it takes seconds.
    """
    built: list[bytes] = []

    def content(openai_server: OpenAIServer) -> bytes:
        if not built:
            built.append(to_json(_build_openapi(app.routes, openai_server)))
        return built[0]

    @app.get(OPENAPI_PATH, include_in_schema=False)
    @public
    async def openapi(server: ReadyServer) -> Response:
        document = await asyncio.to_thread(content, server.engine.openai_server)
        return Response(document, media_type="application/json")


def _build_openapi(routes: Sequence[BaseRoute], openai_server: OpenAIServer) -> dict[str, Any]:
    own_routes = [route for route in routes if isinstance(route, APIRoute)]
    openapi = get_openapi(
        title="Coppice: APIs of other servers", version=__version__, routes=own_routes
    )
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (BODY_MODELS[name], "validation") for name in sorted(BODY_MODELS)
    ]
    _, schemas = models_json_schema(models, ref_template=SCHEMA_REFERENCE)
    of_vllm = serving.request_schemas(openai_server)
    openapi["components"] = {"schemas": {**schemas["$defs"], **of_vllm}}
    for operations in openapi["paths"].values():
        for operation in operations.values():
            # FastAPI's own validation, which never fails on these routes.
            operation["responses"].pop("422", None)
    return openapi
