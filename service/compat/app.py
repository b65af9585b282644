"""Sub-application for other servers' APIs; receives requests that no native route matches."""

from collections.abc import Sequence
from functools import cache
from typing import Literal

from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.routing import APIRoute
from pydantic_core import to_json
from starlette.routing import BaseRoute

from service.auth.access import authorize, declared_access, public
from service.compat import (
    adapters,
    chat,
    completions,
    generate,
    models,
    server_info,
    sglang_control,
    sglang_generate,
    tokenize,
    unsupported_routes,
    vllm_control,
)
from service.compat.error_format import to_openai_json
from service.compat.openapi_document import build_openapi
from service.config.settings import CompatApi
from service.http import exception_handlers

OPENAPI_PATH = "/compat/openapi.json"

RouteAudience = Literal["everybody", "callers", "operators"]

OPENAI = (models.router, completions.router, chat.router, unsupported_routes.openai)
ROUTERS: dict[CompatApi, Sequence[APIRouter]] = {
    "openai": OPENAI,
    "vllm": (
        *(*OPENAI, server_info.router, adapters.router),
        *(generate.router, tokenize.router, vllm_control.router),
        *(unsupported_routes.vllm, unsupported_routes.skyrl),
    ),
    "sglang": (
        *(*OPENAI, server_info.router, adapters.router),
        *(sglang_generate.router, sglang_control.router, unsupported_routes.sglang),
    ),
}


def create_compat_app(
    shapes: Sequence[CompatApi], audience: RouteAudience = "everybody"
) -> FastAPI:
    """Sub-application with the routes of the given APIs.

    A route that two of them share occurs once. The audience "operators" selects the routes that
    require the role admin, "callers" the others.
    """
    app = FastAPI(
        dependencies=[Depends(authorize)],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    exception_handlers.install(app, to_openai_json)
    app.router.routes = [route for route in _routes(tuple(shapes)) if _serves(audience, route)]
    _add_openapi_route(app)
    return app


@cache
def _routes(shapes: tuple[CompatApi, ...]) -> Sequence[BaseRoute]:
    """Routes of the given APIs, shared by all apps: they get their server from the request."""
    selected = [router for shape in shapes for router in ROUTERS[shape]]
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
    content = cache(lambda: to_json(build_openapi(app.routes)))

    @app.get(OPENAPI_PATH, include_in_schema=False)
    @public
    async def openapi() -> Response:
        return Response(content(), media_type="application/json")
