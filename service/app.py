"""The FastAPI application: routes, errors, request ids and counts around one server."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import ModuleType

from fastapi import Depends, FastAPI
from starlette.types import Lifespan

from engine.protocol import Engine
from service import problems
from service.access import authorised
from service.compat.app import create_compat
from service.compat.names import Names
from service.compat.weight_updates import WeightUpdates
from service.edges import Edges
from service.keyring import Keyring
from service.requests import RequestScope
from service.routes import (
    control,
    documents,
    health,
    kv,
    metrics,
    rollouts,
    score,
    status,
    trees,
    ui,
    weights,
)
from service.server import Server
from service.settings import Settings

CALLERS = (rollouts, trees, score, kv, status, health, documents)
OPERATORS = (weights, control, metrics)


def create_app(settings: Settings, engine: Engine) -> FastAPI:
    """With a port for operators, `state.operators` is their app; otherwise it is none, and this one
    has everything. Both have the probes and the status, and share one server.
    """
    server = Server(settings, engine)
    keyring = Keyring(settings.server.keys_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with server.running():
            yield

    operators = (*OPERATORS, ui) if settings.server.ui else OPERATORS
    if settings.server.operators_port is None:
        app = _app(server, keyring, (*CALLERS, *operators), lifespan)
        app.state.operators = None
    else:
        app = _app(server, keyring, CALLERS, lifespan)
        app.state.operators = _app(server, keyring, (*operators, status, health))
    _add_compat(app, server)
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
        dependencies=[Depends(authorised)],
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the redirect would lead to whatever Host says
    )
    app.state.server = server
    app.state.keyring = keyring
    app.add_middleware(Edges, limits=server.settings.limits)
    app.add_middleware(RequestScope, metrics=server.metrics, traces=server.traces)
    problems.install(app)
    for part in parts:
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
