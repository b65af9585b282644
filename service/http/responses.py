"""Declarations of a route's possible responses: status codes, media types and errors.

Their only use is a test that compares them with openapi.yaml in both directions.
"""

from collections.abc import Collection, Mapping
from typing import Any

from service.http import errors, exception_handlers
from service.http.errors import ServiceError

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
CLUSTER_ERRORS: Problems = (errors.ReplicaGone, errors.DirectoryUnavailable)
READINESS_ERRORS: Problems = (errors.NotReady, errors.Draining, errors.EngineGone)
UPLOAD_ERRORS: Problems = (errors.BodyTooLarge, errors.RequestTimeout)
BODY_ERRORS: Problems = (
    *UPLOAD_ERRORS,
    errors.InvalidJson,
    errors.InvalidRequest,
    errors.UnsupportedMediaType,
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


def declare_responses(
    successes: Mapping[int, Collection[str]], *raised: type[ServiceError]
) -> Responses:
    """Value of a route's `responses=`.

    `successes`: the media types of each success status. `raised`: the errors that the route can
    raise, besides `COMMON_ERRORS`.
    """
    responses: Responses = {
        status: _content(media_types) for status, media_types in successes.items()
    }
    for problem in (*COMMON_ERRORS, *raised):
        responses[problem.kind().status] = _content([exception_handlers.MEDIA_TYPE])
    return responses


def _content(media_types: Collection[str]) -> dict[str, Any]:
    return {"content": {media_type: {} for media_type in media_types}}
