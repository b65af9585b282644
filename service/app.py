"""The FastAPI application: routes, errors, request ids and counts around one server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI

from engine.protocol import Engine
from service import problems
from service.access import authorised
from service.edges import Edges
from service.keyring import Keyring
from service.requests import RequestScope
from service.routes import control, documents, health, kv, rollouts, score, trees, weights
from service.server import Server
from service.settings import Settings


def create_app(settings: Settings, engine: Engine) -> FastAPI:
    server = Server(settings, engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with server.running():
            yield

    # The contract is openapi.yaml, written by hand; FastAPI must not serve another.
    app = FastAPI(
        lifespan=lifespan,
        dependencies=[Depends(authorised)],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the redirect would lead to whatever Host says
    )
    app.state.server = server
    app.state.keyring = Keyring(settings.server.keys_file)
    app.add_middleware(Edges, limits=settings.limits)
    app.add_middleware(RequestScope, metrics=server.metrics)
    problems.install(app)
    for part in (rollouts, trees, score, kv, weights, control, health, documents):
        app.include_router(part.router)
    return app
