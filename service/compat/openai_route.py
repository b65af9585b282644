"""Route class that answers invalid requests with 400, where the native routes answer 422."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from service.http.errors import ServiceError
from service.http.responses import Responses

UNPROCESSABLE, BAD_REQUEST = 422, 400
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class OpenAIRoute(APIRoute):
    """Route that turns status 422 into 400.

    OpenAI's clients, and proxies for vLLM, expect 400 for an invalid request.
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
    """Response declarations of such a route."""
    return {status: answer for status, answer in responses.items() if status != UNPROCESSABLE}
