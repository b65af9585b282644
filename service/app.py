"""Construction of the FastAPI application: routes, error handlers and middleware."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache

from fastapi import APIRouter, Depends, FastAPI
from starlette.routing import BaseRoute
from starlette.types import Lifespan

from engine.protocol import Engine
from service.auth.access import authorize
from service.auth.keys import Keyring
from service.cluster.registry import ClusterRegistry
from service.compat.app import RouteAudience, create_compat_app
from service.compat.response_store import ResponseStore
from service.compat.sglang.running_requests import RequestIds
from service.compat.weight_updates import WeightUpdates
from service.config.settings import Settings
from service.http import exception_handlers
from service.http.cross_site import AllowedHosts
from service.routes import (
    adapters,
    api_documents,
    drafter,
    external_trees,
    handoff,
    kv,
    monitoring,
    pause,
    rollouts,
    score,
    sessions,
    ui,
    weights,
)
from service.routes.middleware import LimitsMiddleware, RequestContextMiddleware
from service.server import Server
from service.status.dashboard_snapshot import Snapshots
from service.status.features import features, table

CALLERS = (
    rollouts.router,
    external_trees.router,
    sessions.router,
    score.router,
    kv.router,
    weights.files,
    handoff.router,
    api_documents.router,
)
OPERATORS = (
    *(weights.router, adapters.router, drafter.router, pause.router),
    monitoring.metrics,
)
COMMON = (monitoring.router, api_documents.problems)
ROUTERS: dict[RouteAudience, Sequence[APIRouter]] = {
    "callers": (*CALLERS, *COMMON),
    "operators": (*OPERATORS, *COMMON),
    "everybody": (*CALLERS, *OPERATORS, *COMMON),
}

log = logging.getLogger(__name__)


def create_app(
    settings: Settings, engine: Engine, registry: ClusterRegistry | None = None
) -> FastAPI:
    """Create the application for callers and, if an operators port is set, one for operators.

    With `server.operators_port`, the operators' app is `app.state.operators`. Without it,
    `app.state.operators` is None and the returned app has all routes. Both apps serve the probes,
    the status and the catalogue of problems, and share one `Server`.
    """
    server = Server(settings, engine, registry)
    server.serving_observers.append(lambda: _log_features(server))
    keyring = Keyring(settings.server.keys_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with server.running():
            yield

    if settings.server.operators_port is None:
        app = _app(server, keyring, "everybody", lifespan)
        app.state.operators = None
    else:
        app = _app(server, keyring, "callers", lifespan)
        app.state.operators = _app(server, keyring, "operators")
    return app


def _log_features(server: Server) -> None:
    log.info("features:\n%s", table(features(server)))


def _app(
    server: Server,
    keyring: Keyring,
    audience: RouteAudience,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    # The API contract is the hand-written openapi.yaml; FastAPI must not serve a generated one.
    app = FastAPI(
        lifespan=lifespan,
        dependencies=[Depends(authorize)],  # also covers routes added later
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # its target would be taken from the Host header
    )
    app.state.server = server
    app.state.snapshots = Snapshots(server)
    app.state.keyring = keyring
    app.state.allowed_hosts = AllowedHosts(server.settings.server)
    app.add_middleware(LimitsMiddleware, limits=server.settings.limits)
    app.add_middleware(RequestContextMiddleware, metrics=server.metrics, traces=server.traces)
    exception_handlers.install(app)
    with_ui = server.settings.server.ui and audience != "callers"
    app.router.routes.extend(_routes(audience, with_ui))
    _add_compat(app, server, audience)
    return app


@cache
def _routes(audience: RouteAudience, with_ui: bool) -> Sequence[BaseRoute]:
    """HTTP routes for one audience: callers, operators or everybody.

    Cached, because building them takes most of the time to create an app. Apps can share them: a
    route gets its server from the request.
    """
    combined = APIRouter(dependencies=[Depends(authorize)])
    for router in (*ROUTERS[audience], *((ui.router,) if with_ui else ())):
        combined.include_router(router)
    return combined.routes


def _add_compat(app: FastAPI, server: Server, audience: RouteAudience) -> None:
    """Serve the APIs of other inference servers on paths that match no native route.

    The compat app is the router's default app. A mount would also take over the 405 responses of
    native routes.
    """
    compat = create_compat_app(server.settings.server.compat, audience)
    compat.state.server = server
    compat.state.keyring = app.state.keyring
    compat.state.allowed_hosts = app.state.allowed_hosts
    compat.state.request_ids = RequestIds()
    app.state.responses = compat.state.responses = ResponseStore()
    compat.state.weight_updates = WeightUpdates(server)
    app.state.compat = compat
    app.router.default = compat
