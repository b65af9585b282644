"""What a route can answer, declared beside its code: media types, and what it raises.

The declarations serve one purpose: a test compares them with openapi.yaml, in both directions.
"""

from collections.abc import Collection, Mapping
from typing import Any

from service.http import errors, exception_handlers
from service.http.errors import ServiceError

Problems = Collection[type[ServiceError]]
Responses = dict[int | str, dict[str, Any]]

JSON = ("application/json",)
NOTHING: tuple[str, ...] = ()

ANYWHERE: Problems = (
    errors.Forbidden,
    errors.HeadersTooLarge,
    errors.Internal,
    errors.Overloaded,
)
WITH_KEY: Problems = (errors.Unauthorized,)
ELSEWHERE = {307: NOTHING}
OF_FLEET: Problems = (errors.ReplicaGone, errors.DirectoryUnavailable)
WHEN_READY: Problems = (errors.NotReady, errors.Draining, errors.EngineGone)
OF_UPLOAD: Problems = (errors.BodyTooLarge, errors.RequestTimeout)
OF_BODY: Problems = (
    *OF_UPLOAD,
    errors.InvalidJson,
    errors.InvalidRequest,
    errors.UnsupportedMediaType,
)
OF_ENGINE_WORK: Problems = (
    errors.AdapterNotFound,
    errors.PromptTooLong,
    errors.NoChatTemplate,
    errors.VersionSuperseded,
    errors.VersionUnavailable,
    errors.QuotaExceeded,
    errors.Overloaded,
)


def answers(good: Mapping[int, Collection[str]], *raised: type[ServiceError]) -> Responses:
    """For a route's `responses=`: the media types of each status, then what it can raise."""
    declared: Responses = {status: _content(media_types) for status, media_types in good.items()}
    for problem in (*ANYWHERE, *raised):
        declared[problem.kind().status] = _content([exception_handlers.MEDIA_TYPE])
    return declared


def _content(media_types: Collection[str]) -> dict[str, Any]:
    return {"content": {media_type: {} for media_type in media_types}}
