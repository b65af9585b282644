"""The sub-application: asked when none of our own routes has the address."""

from collections.abc import Sequence

from fastapi import APIRouter, Depends, FastAPI, Response
from pydantic_core import to_json

from service import problems
from service.access import authorised, public
from service.compat import (
    chat,
    completions,
    generate,
    models,
    server_info,
    sglang_control,
    sglang_generate,
    unserved,
    vllm_control,
)
from service.compat.document import document
from service.compat.messages import with_message
from service.settings import Shape

DOCUMENT = "/compat/openapi.json"

OPENAI = (models.router, completions.router, chat.router)
ROUTERS: dict[Shape, Sequence[APIRouter]] = {
    "openai": OPENAI,
    "vllm": (*OPENAI, server_info.router, generate.router, vllm_control.router, unserved.vllm),
    "sglang": (
        *(*OPENAI, server_info.router),
        *(sglang_generate.router, sglang_control.router, unserved.sglang),
    ),
}


def create_compat(shapes: Sequence[Shape]) -> FastAPI:
    """Routes that two shapes share are there once."""
    app = FastAPI(
        dependencies=[Depends(authorised)],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    problems.install(app, with_message)
    wanted = [router for shape in shapes for router in ROUTERS[shape]]
    for router in {id(router): router for router in wanted}.values():
        app.include_router(router)
    _describe(app)
    return app


def _describe(app: FastAPI) -> None:
    content = to_json(document(app.routes))

    @app.get(DOCUMENT, include_in_schema=False)
    @public
    async def described() -> Response:
        return Response(content, media_type="application/json")
