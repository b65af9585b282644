"""Exception handlers that return problem documents, and cancellation when a client disconnects."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import Scope

from coppice.wire.problem_catalogue import Problem
from engine.errors import EngineDead, RequestRefused
from service.errors import (
    EngineGone,
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    RedirectToReplica,
    ServiceError,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")

CLIENT_CLOSED_REQUEST = 499  # status of nginx; HTTP has none
ENGINE_RETRY_SECONDS = 30.0
MEDIA_TYPE = "application/problem+json"
NO_HEADERS: Mapping[str, str] = {}


def as_json(problem: Problem) -> str:
    return problem.model_dump_json(exclude_none=True)


@dataclass(frozen=True, slots=True)
class ProblemFormat:
    """Format of error responses: body, media type and status codes that differ from ours."""

    write: Callable[[Problem], str] = as_json
    media_type: str = MEDIA_TYPE
    statuses: Mapping[int, int] = field(default_factory=dict)


NATIVE = ProblemFormat()
FORMAT_SCOPE_KEY = "coppice.problem_format"
"""Key of the scope for the format of a route's error responses, if it is not that of its app."""


def install(app: FastAPI, problem_format: ProblemFormat = NATIVE) -> None:
    app.state.problem_format = problem_format
    app.add_exception_handler(ServiceError, _service_error)
    app.add_exception_handler(HTTPException, _framework_error)
    app.add_exception_handler(ClientDisconnect, _client_disconnected)
    app.add_exception_handler(EngineDead, _engine_dead)
    app.add_exception_handler(Exception, _unhandled_error)
    app.add_exception_handler(RedirectToReplica, _redirect)


def problem_response(
    problem: Problem,
    *,
    headers: Mapping[str, str] | None = None,
    problem_format: ProblemFormat = NATIVE,
) -> Response:
    retry = problem.retry_after_seconds
    sent = {} if retry is None else {"Retry-After": str(max(1, round(retry)))}
    return Response(
        problem_format.write(problem),
        status_code=problem_format.statuses.get(problem.status, problem.status),
        media_type=problem_format.media_type,
        headers={**sent, **(headers or {})},
    )


def error_response(
    scope: Scope, error: ServiceError, headers: Mapping[str, str] = NO_HEADERS
) -> Response:
    """Build the problem-document response to an exception, and count it in the metrics."""
    scope["app"].state.server.metrics.http.problems.labels(error.kind.code).inc()
    problem = error.problem(scope.get("coppice.request_id"))
    problem_format = scope.get(FORMAT_SCOPE_KEY) or scope["app"].state.problem_format
    merged = {**error.headers, **headers}
    return problem_response(problem, headers=merged, problem_format=problem_format)


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return error_response(request.scope, error)


async def _framework_error(request: Request, error: Exception) -> Response:
    """Answer Starlette's HTTPException with the problem for an unknown path or method.

    Starlette raises it only for these; the service parses all bodies itself.
    """
    assert isinstance(error, HTTPException)
    problem_error = {404: NotFound(), 405: MethodNotAllowed()}.get(error.status_code, Internal())
    headers = (
        {"Allow": _allowed_methods(request)} if isinstance(problem_error, MethodNotAllowed) else {}
    )
    return error_response(request.scope, problem_error, headers)


async def _engine_dead(request: Request, error: Exception) -> Response:
    """Answer EngineDead, raised by routes that call the engine directly, such as a pause."""
    return await _service_error(request, EngineGone(retry_after_seconds=ENGINE_RETRY_SECONDS))


def _allowed_methods(request: Request) -> str:
    """Value of the header `Allow`: the methods of all routes of the path.

    Starlette lists the methods of the first matching route only.
    """
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in matching for method in route.methods or ()}))


async def _client_disconnected(request: Request, error: Exception) -> Response:
    """Handle a client that disconnects while its request is read or served.

    Nobody receives the response, but the metrics count it.
    """
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _unhandled_error(request: Request, error: Exception) -> Response:
    """Log an unexpected exception and answer it with an internal error.

    Starlette raises the exception again after the response, and uvicorn closes the connection.
    """
    log.error("request failed", exc_info=error)
    return error_response(request.scope, Internal(), {"Connection": "close"})


async def _redirect(request: Request, error: Exception) -> Response:
    """Redirect a request to the replica that has its resource; 307 keeps method and body."""
    assert isinstance(error, RedirectToReplica)
    query = error.query or request.scope["query_string"].decode("latin-1")
    location = error.url.rstrip("/") + quote(request.scope["path"]) + (query and f"?{query}")
    request.app.state.server.metrics.cluster.redirects.inc()
    return Response(status_code=307, headers={"Location": location})


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`; if the client disconnects first, cancel it and raise ClientDisconnect.

    The body must have been read before: the only message after it is the disconnect.
    """
    disconnected = asyncio.create_task(_wait_for_disconnect(request))
    done = asyncio.create_task(work)
    try:
        await asyncio.wait({disconnected, done}, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            return done.result()
        raise ClientDisconnect
    finally:
        for task in (disconnected, done):
            task.cancel()
        await asyncio.gather(disconnected, done, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def to_service_error(failures: BaseExceptionGroup[BaseException]) -> ServiceError:
    """Convert the first exception of an exception group to the error for the client.

    An unexpected exception is logged and reported as Internal, without details.
    """
    first: BaseException = failures
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    match first:
        case ServiceError():
            return first
        case EngineDead():
            return EngineGone(retry_after_seconds=ENGINE_RETRY_SECONDS)
        case RequestRefused():
            return InvalidRequest(str(first))
    log.error("unexpected error", exc_info=failures)
    return Internal()
