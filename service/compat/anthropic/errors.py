"""Conversion of errors to Anthropic's format, for the routes of its API."""

import json
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from coppice.wire.problem_catalogue import Problem
from service.compat.openai_errors import Handler, problem_message
from service.http.exception_handlers import FORMAT_SCOPE_KEY, ProblemFormat
from service.http.responses import JSON, Responses

STATUSES = {422: 400, 503: 529, 507: 500}
"""Status codes of Anthropic's API for ours; its clients repeat requests that got 529."""
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": []}
"""Details on which Anthropic's tool runner repeats the request with all messages."""


def anthropic_error(problem: Problem) -> dict[str, Any]:
    """Body of an error response; `code` is that of the problem."""
    default = "api_error" if problem.status >= 500 else "invalid_request_error"
    kind = _KINDS.get(problem.status, default)
    error: dict[str, Any] = {
        "type": kind,
        "message": problem_message(problem),
        "code": problem.code,
    }
    if any(each["location"] == "thread" for each in problem.errors or ()):
        error["details"] = _NO_THREADS
    return {"type": "error", "error": error, "request_id": problem.request_id}


_FORMAT = ProblemFormat(lambda problem: json.dumps(anthropic_error(problem)), JSON[0], STATUSES)


class AnthropicRoute(APIRoute):
    """Route whose errors have Anthropic's format and status codes."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_as_anthropic(request: Request) -> Response:
            request.scope[FORMAT_SCOPE_KEY] = _FORMAT
            return await handle(request)

        return handle_as_anthropic


def as_anthropic(responses: Responses) -> Responses:
    """Response declarations of an `AnthropicRoute`."""
    errors = {status for status in responses if isinstance(status, int) and status >= 400}
    kept = {status: answer for status, answer in responses.items() if status not in errors}
    return kept | {STATUSES.get(status, status): {"content": {JSON[0]: {}}} for status in errors}
