"""The FastAPI application: routes, errors, request ids and counts around one server."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from types import ModuleType

from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import BaseRoute
from starlette.types import Lifespan

from engine.protocol import Engine
from service.auth.access import authorize
from service.auth.keyring import Keyring
from service.cluster.registry import ClusterRegistry
from service.compat.app import RouteAudience, create_compat_app
from service.compat.request_ids import RequestIds
from service.compat.weight_updates import WeightUpdates
from service.config.settings import Settings
from service.http import exception_handlers
from service.http.cross_site import AllowedHosts
from service.http.limits import LimitsMiddleware
from service.http.middleware import RequestContextMiddleware
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

CALLER_ROUTES = (rollouts, trees, score, kv, weight_files, status, health, documents)
OPERATOR_ROUTES = (weights, adapters, drafter, control, metrics)


def create_app(
    settings: Settings, engine: Engine, directory: ClusterRegistry | None = None
) -> FastAPI:
    """With a port for operators, `state.operators` is their app; otherwise it is none, and this one
    has everything. Both have the probes and the status, and share one server.
    """
    server = Server(settings, engine, directory)
    keyring = Keyring(settings.server.keys_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with server.running():
            yield

    operators = (*OPERATOR_ROUTES, ui) if settings.server.ui else OPERATOR_ROUTES
    if settings.server.operators_port is None:
        app = _app(server, keyring, (*CALLER_ROUTES, *operators), lifespan)
        app.state.operators = None
        _add_compat(app, server, "everybody")
    else:
        app = _app(server, keyring, CALLER_ROUTES, lifespan)
        app.state.operators = _app(server, keyring, (*operators, status, health))
        app.state.operators.state.connections = server.operators
        _add_compat(app, server, "callers")
        _add_compat(app.state.operators, server, "operators")
    return app


def _app(
    server: Server,
    keyring: Keyring,
    route_modules: Sequence[ModuleType],
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    # The contract is openapi.yaml, written by hand; FastAPI must not serve another.
    app = FastAPI(
        lifespan=lifespan,
        dependencies=[Depends(authorize)],  # of what is added to it later, too
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the redirect would lead to whatever Host says
    )
    app.state.server = server
    app.state.keyring = keyring
    app.state.connections = server.callers
    app.state.allowed_hosts = AllowedHosts(server.settings.server)
    app.add_middleware(LimitsMiddleware, limits=server.settings.limits)
    app.add_middleware(RequestContextMiddleware, metrics=server.metrics, traces=server.traces)
    exception_handlers.install(app)
    app.router.routes.extend(_routes(tuple(route_modules)))
    return app


@cache
def _routes(route_modules: tuple[ModuleType, ...]) -> Sequence[BaseRoute]:
    """They find their server in the request: to make them anew is most of what an app costs."""
    router = APIRouter(dependencies=[Depends(authorize)])
    for route_module in route_modules:
        router.include_router(route_module.router)
    return router.routes


def _add_compat(app: FastAPI, server: Server, audience: RouteAudience) -> None:
    """Asked last, for addresses that are none of ours: a mount would swallow their 405 as well."""
    compat = create_compat_app(server.settings.server.compat, audience)
    compat.state.server = server
    compat.state.keyring = app.state.keyring
    compat.state.allowed_hosts = app.state.allowed_hosts
    compat.state.request_ids = RequestIds()
    compat.state.weight_updates = WeightUpdates(server)
    app.state.compat = compat
    app.router.default = compat
