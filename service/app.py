"""The FastAPI application: routes, errors, request ids and counts around one server."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from engine.protocol import Engine
from service import problems
from service.requests import RequestScope
from service.routes import control, documents, health, rollouts, weights
from service.server import Server
from service.settings import Settings


def _nothing() -> None:
    pass


def create_app(
    settings: Settings,
    engine: Engine,
    *,
    on_ready: Callable[[], None] = _nothing,
    on_failure: Callable[[], None] = _nothing,
) -> FastAPI:
    """`on_ready` is called once requests can be served, `on_failure` if that will never be."""
    server = Server(settings, engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with server.running(on_ready=on_ready, on_failure=on_failure):
            yield

    # The contract is openapi.yaml, written by hand; FastAPI must not serve another.
    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.server = server
    app.add_middleware(RequestScope, metrics=server.metrics)
    problems.install(app)
    for part in (rollouts, weights, control, health, documents):
        app.include_router(part.router)
    return app
