"""The sub-application: asked when none of our own routes has the address."""

from collections.abc import Sequence
from functools import cache
from typing import Literal

from fastapi import APIRouter, Depends, FastAPI, Response
from fastapi.routing import APIRoute
from pydantic_core import to_json
from starlette.routing import BaseRoute

from service.auth.access import authorised, declared, public
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
from service.compat.error_format import with_message
from service.compat.openapi_document import document
from service.config.settings import Shape
from service.http import exception_handlers

DOCUMENT = "/compat/openapi.json"

Audience = Literal["everybody", "callers", "operators"]

OPENAI = (models.router, completions.router, chat.router, unsupported_routes.openai)
ROUTERS: dict[Shape, Sequence[APIRouter]] = {
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


def create_compat(shapes: Sequence[Shape], audience: Audience = "everybody") -> FastAPI:
    """Routes that two shapes share are there once. Operators are who needs the role admin."""
    app = FastAPI(
        dependencies=[Depends(authorised)],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    exception_handlers.install(app, with_message)
    app.router.routes = [route for route in _routes(tuple(shapes)) if _is_for(audience, route)]
    _describe(app)
    return app


@cache
def _routes(shapes: tuple[Shape, ...]) -> Sequence[BaseRoute]:
    """They find their server in the request, so all apps share them."""
    wanted = [router for shape in shapes for router in ROUTERS[shape]]
    together = APIRouter(dependencies=[Depends(authorised)])
    for router in {id(router): router for router in wanted}.values():
        together.include_router(router)
    return together.routes


def _is_for(audience: Audience, route: BaseRoute) -> bool:
    assert isinstance(route, APIRoute), "these shapes have no other routes"
    access = declared(route.endpoint)
    is_admin = access is not None and access.role == "admin"
    return audience == "everybody" or is_admin == (audience == "operators")


def _describe(app: FastAPI) -> None:
    """Generated when it is first asked for: few ask, and it is most of the time the app takes."""
    content = cache(lambda: to_json(document(app.routes)))

    @app.get(DOCUMENT, include_in_schema=False)
    @public
    async def described() -> Response:
        return Response(content(), media_type="application/json")
