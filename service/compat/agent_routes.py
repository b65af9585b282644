"""Routes /sessions/{id}/...: the OpenAI and Anthropic APIs, for the calls of agents in a session.

A handler gets the session from its `CompatRequest`. An agent's client is given this path as the
base URL, and the session's key as the API key.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any

from fastapi import APIRouter, Response
from fastapi.routing import APIRoute

from service.auth.access import agent
from service.compat import model_and_adapter_routes
from service.compat.serving import routes as serving

PREFIX = "/sessions/{session_id}"
SHARED: Sequence[APIRouter] = (
    serving.openai,
    serving.anthropic,
    model_and_adapter_routes.openai,
)
Endpoint = Callable[..., Awaitable[Response]]


def _agent_router() -> APIRouter:
    """Router with the shared routes, which accept the key of the session only."""
    router = APIRouter(prefix=PREFIX)
    for route in (route for shared in SHARED for route in shared.routes):
        assert isinstance(route, APIRoute), "the shared routers have no other routes"
        router.add_api_route(
            route.path,
            _agent_endpoint(route.endpoint),
            methods=sorted(route.methods),
            openapi_extra=route.openapi_extra,
            route_class_override=type(route),
        )
    return router


def _agent_endpoint(endpoint: Endpoint) -> Endpoint:
    """A copy of an endpoint with the path parameter `session_id`, which only agents may use."""

    @wraps(endpoint)
    async def handle(session_id: str, **kwargs: Any) -> Response:
        return await endpoint(**kwargs)

    own = inspect.Parameter("session_id", inspect.Parameter.KEYWORD_ONLY, annotation=str)
    given = inspect.signature(endpoint)
    signature = given.replace(parameters=[*given.parameters.values(), own])
    handle.__signature__ = signature  # type: ignore[attr-defined]  # FastAPI reads it
    return agent(handle)


router = _agent_router()
