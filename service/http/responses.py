"""JSON responses, small or large, and declarations of a route's possible responses.

The declarations list status codes, media types and errors. Their only use is a test that compares
them with openapi.yaml in both directions.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from fastapi import Response
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from service import errors
from service.errors import ServiceError
from service.fair_threads import FairThreads
from service.http import exception_handlers

Problems = Collection[type[ServiceError]]
Responses = dict[int | str, dict[str, Any]]
JSON = ("application/json",)
NO_CONTENT: tuple[str, ...] = ()
COMMON_ERRORS: Problems = (
    errors.Forbidden,
    errors.HeadersTooLarge,
    errors.Internal,
    errors.Overloaded,
)
AUTH_ERRORS: Problems = (errors.Unauthorized,)
REDIRECT = {307: NO_CONTENT}
CLUSTER_ERRORS: Problems = (errors.ReplicaGone, errors.ClusterUnavailable)
READINESS_ERRORS: Problems = (errors.NotReady, errors.Draining, errors.EngineGone)
ADMIN_ERRORS: Problems = (*AUTH_ERRORS, *READINESS_ERRORS)
UPLOAD_ERRORS: Problems = (errors.BodyTooLarge, errors.RequestTimeout)
BODY_ERRORS: Problems = (
    *UPLOAD_ERRORS,
    errors.InvalidJson,
    errors.InvalidRequest,
    errors.UnsupportedMediaType,
)
FILE_ERRORS: Problems = (
    errors.InvalidRequest,
    errors.VersionConflict,
    errors.WeightsRefused,
    errors.DigestMismatch,
    errors.InsufficientStorage,
)
ENGINE_ERRORS: Problems = (
    errors.AdapterNotFound,
    errors.PromptTooLong,
    errors.NoChatTemplate,
    errors.VersionSuperseded,
    errors.VersionUnavailable,
    errors.QuotaExceeded,
    errors.Overloaded,
)
PART_BYTES = 256 * 2**10
"""Bytes of a large body that are sent at a time, so that the timeout of sending is one of each."""


def declare_responses(
    successes: Mapping[int, Collection[str]], *raised: type[ServiceError]
) -> Responses:
    """Declare the responses that a route can return, for the route's argument `responses`.

    `successes`: the media types of each success status. `raised`: the errors that the route can
    raise, besides `COMMON_ERRORS`.
    """
    responses: Responses = {
        status: _content(media_types) for status, media_types in successes.items()
    }
    for problem in (*COMMON_ERRORS, *raised):
        responses[problem.kind.status] = _content([exception_handlers.MEDIA_TYPE])
    return responses


def _content(media_types: Collection[str]) -> dict[str, Any]:
    return {"content": {media_type: {} for media_type in media_types}}


def json_response(answer: object, status_code: int = 200) -> Response:
    """JSON response from a small pydantic model or from plain values."""
    return Response(to_json_bytes(answer), status_code, media_type=JSON[0])


def to_json_bytes(answer: object) -> bytes:
    """JSON of a pydantic model or of plain values."""
    return answer.model_dump_json().encode() if isinstance(answer, BaseModel) else to_json(answer)


class LargeResponse(Response):
    """Response whose body is sent in parts.

    The whole body at once would have to be received within the timeout of one write.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        for part in parts_of(bytes(self.body)):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def parts_of(body: bytes) -> Iterator[bytes]:
    """The body in parts of at most `PART_BYTES`."""
    return (body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES))


async def large_response(
    threads: FairThreads,
    encode: Callable[[], bytes],
    *,
    media_type: str = JSON[0],
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Response with a large body, encoded in a thread because it would block the event loop."""
    body = await threads.run("answers", 0, encode)
    return LargeResponse(body, media_type=media_type, headers=headers)
