"""Conversion of Coppice's errors to OpenAI's format, for the OpenAI, vLLM and SGLang APIs."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from coppice.wire.problem_catalogue import Problem
from service.errors import ServiceError
from service.http.responses import Responses

UNPROCESSABLE, BAD_REQUEST = 422, 400
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class OpenAIRoute(APIRoute):
    """Route that answers an invalid request with 400, where the native routes answer 422.

    OpenAI's clients, and proxies for vLLM, expect 400.
    """

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_as_openai(request: Request) -> Response:
            try:
                return await handle(request)
            except ServiceError as error:
                if error.status == UNPROCESSABLE:
                    error.status = BAD_REQUEST
                raise

        return handle_as_openai


def as_openai(responses: Responses) -> Responses:
    """Response declarations of an `OpenAIRoute`, which never responds with 422."""
    return {status: answer for status, answer in responses.items() if status != UNPROCESSABLE}


def to_openai_json(problem: Problem) -> str:
    return json.dumps(with_openai_error(problem))


def with_openai_error(problem: Problem) -> dict[str, Any]:
    """Problem document with the member `error`, the only one that OpenAI's client shows."""
    wrong = problem.errors[0]["location"] if problem.errors else None
    error = {
        "message": problem_message(problem),
        "type": "invalid_request_error" if problem.status == BAD_REQUEST else problem.code,
        "param": wrong,
        "code": problem.code,
    }
    return {**problem.model_dump(exclude_none=True), "error": error}


def problem_message(problem: Problem) -> str:
    """Text of a problem in one line, with the invalid fields."""
    field_errors = [f"{fault['location']}: {fault['message']}" for fault in problem.errors or ()]
    messages = [text for text in (problem.detail or problem.title, *field_errors) if text]
    return "; ".join(dict.fromkeys(messages))
