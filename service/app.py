"""The FastAPI application: routes, errors, request ids and counts around one server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI

from engine.protocol import Engine
from service import problems
from service.access import authorised
from service.compat.app import create_compat
from service.compat.names import Names
from service.compat.weight_updates import WeightUpdates
from service.edges import Edges
from service.keyring import Keyring
from service.requests import RequestScope
from service.routes import control, documents, health, rollouts, score, weights
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
    _add_compat(app, server)
    for part in (rollouts, score, weights, control, health, documents):
        app.include_router(part.router)
    return app


def _add_compat(app: FastAPI, server: Server) -> None:
    """Asked last, for addresses that are none of ours: a mount would swallow their 405 as well."""
    compat = create_compat(server.settings.server.compat)
    compat.state.server = server
    compat.state.keyring = app.state.keyring
    compat.state.names = Names()
    compat.state.weight_updates = WeightUpdates(server)
    app.state.compat = compat
    app.router.default = compat
