"""The FastAPI application: routes, errors, request ids and counts around one server."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from types import ModuleType

from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import BaseRoute
from starlette.types import Lifespan

from engine.protocol import Engine
from service.auth.access import authorised
from service.auth.keyring import Keyring
from service.cluster.registry import Directory
from service.compat.app import Audience, create_compat
from service.compat.request_ids import Names
from service.compat.weight_updates import WeightUpdates
from service.config.settings import Settings
from service.http import exception_handlers
from service.http.cross_site import AllowedHosts
from service.http.limits import Edges
from service.http.middleware import RequestScope
from service.routes import (
    adapters,
    control,
    documents,
    drafter,
    health,
    kv,
    metrics,
    rollouts,
    score,
    status,
    trees,
    ui,
    weight_files,
    weights,
)
from service.server import Server

CALLERS = (rollouts, trees, score, kv, weight_files, status, health, documents)
OPERATORS = (weights, adapters, drafter, control, metrics)


def create_app(settings: Settings, engine: Engine, directory: Directory | None = None) -> FastAPI:
    """With a port for operators, `state.operators` is their app; otherwise it is none, and this one
    has everything. Both have the probes and the status, and share one server.
    """
    server = Server(settings, engine, directory)
    keyring = Keyring(settings.server.keys_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with server.running():
            yield

    operators = (*OPERATORS, ui) if settings.server.ui else OPERATORS
    if settings.server.operators_port is None:
        app = _app(server, keyring, (*CALLERS, *operators), lifespan)
        app.state.operators = None
        _add_compat(app, server, "everybody")
    else:
        app = _app(server, keyring, CALLERS, lifespan)
        app.state.operators = _app(server, keyring, (*operators, status, health))
        app.state.operators.state.connections = server.operators
        _add_compat(app, server, "callers")
        _add_compat(app.state.operators, server, "operators")
    return app


def _app(
    server: Server,
    keyring: Keyring,
    parts: Sequence[ModuleType],
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    # The contract is openapi.yaml, written by hand; FastAPI must not serve another.
    app = FastAPI(
        lifespan=lifespan,
        dependencies=[Depends(authorised)],  # of what is added to it later, too
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the redirect would lead to whatever Host says
    )
    app.state.server = server
    app.state.keyring = keyring
    app.state.connections = server.callers
    app.state.allowed_hosts = AllowedHosts(server.settings.server)
    app.add_middleware(Edges, limits=server.settings.limits)
    app.add_middleware(RequestScope, metrics=server.metrics, traces=server.traces)
    exception_handlers.install(app)
    app.router.routes.extend(_routes(tuple(parts)))
    return app


@cache
def _routes(parts: tuple[ModuleType, ...]) -> Sequence[BaseRoute]:
    """They find their server in the request: to make them anew is most of what an app costs."""
    router = APIRouter(dependencies=[Depends(authorised)])
    for part in parts:
        router.include_router(part.router)
    return router.routes


def _add_compat(app: FastAPI, server: Server, audience: Audience) -> None:
    """Asked last, for addresses that are none of ours: a mount would swallow their 405 as well."""
    compat = create_compat(server.settings.server.compat, audience)
    compat.state.server = server
    compat.state.keyring = app.state.keyring
    compat.state.allowed_hosts = app.state.allowed_hosts
    compat.state.names = Names()
    compat.state.weight_updates = WeightUpdates(server)
    app.state.compat = compat
    app.router.default = compat
