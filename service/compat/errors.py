"""Error responses in OpenAI's and Anthropic's formats, and routes that have them."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from coppice.wire.problem_catalogue import Problem
from service.http.exception_handlers import FORMAT_SCOPE_KEY, ProblemFormat
from service.http.responses import JSON

BAD_REQUEST = 400
Handler = Callable[[Request], Coroutine[Any, Any, Response]]

_TYPES = {
    BAD_REQUEST: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
"""vLLM's types of errors by status; it has no other."""
# Anthropic's clients repeat requests that got 529.
_ANTHROPIC_STATUSES = {422: BAD_REQUEST, 503: 529, 507: 500}
_ANTHROPIC_KINDS = {
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


def to_openai_json(problem: Problem) -> str:
    """Problem document with the member `error`, the only one that OpenAI's client shows."""
    return json.dumps({**problem.model_dump(exclude_none=True), "error": openai_error(problem)})


def openai_error(problem: Problem) -> dict[str, Any]:
    """Error as in vLLM's ErrorResponse.

    Errors that vLLM does not have, such as those of limits, have the code of the problem.
    """
    return {
        "message": _message(problem),
        "type": _TYPES.get(problem.status, problem.code),
        "param": problem.errors[0]["location"] if problem.errors else None,
        "code": problem.status if problem.status in _TYPES else problem.code,
    }


def _bad_request_json(problem: Problem) -> str:
    is_wrong = problem.status == 422
    return to_openai_json(
        problem.model_copy(update={"status": BAD_REQUEST}) if is_wrong else problem
    )


def _anthropic_json(problem: Problem) -> str:
    default = "api_error" if problem.status >= 500 else "invalid_request_error"
    error: dict[str, Any] = {
        "type": _ANTHROPIC_KINDS.get(problem.status, default),
        "message": _message(problem),
        "code": problem.code,
    }
    if any(each["location"] == "thread" for each in problem.errors or ()):
        error["details"] = _NO_THREADS
    return json.dumps({"type": "error", "error": error, "request_id": problem.request_id})


def _message(problem: Problem) -> str:
    """Text of a problem in one line, with the invalid fields."""
    field_errors = [f"{fault['location']}: {fault['message']}" for fault in problem.errors or ()]
    messages = [text for text in (problem.detail or problem.title, *field_errors) if text]
    return "; ".join(dict.fromkeys(messages))


class _FormattedRoute(APIRoute):
    problem_format: ProblemFormat

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_formatted(request: Request) -> Response:
            request.scope[FORMAT_SCOPE_KEY] = self.problem_format
            return await handle(request)

        return handle_formatted


class OpenAIRoute(_FormattedRoute):
    """Route that answers an invalid request with 400, where the native routes answer 422.

    OpenAI's clients, and proxies for vLLM, expect 400.
    """

    problem_format = ProblemFormat(_bad_request_json, statuses={422: BAD_REQUEST})


class AnthropicRoute(_FormattedRoute):
    """Route whose errors have Anthropic's format and status codes."""

    problem_format = ProblemFormat(_anthropic_json, JSON[0], _ANTHROPIC_STATUSES)
