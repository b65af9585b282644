"""Errors that are answered with a problem document; one class per entry of `PROBLEMS`.

ServiceError
|- CallerError                        the request is at fault; a retry does not help
|  |- MalformedRequest, InvalidJson, InvalidRequest, Unsupported, PromptTooLong, NoChatTemplate
|  |- Unauthorized, Forbidden, QuotaExceeded, RequestTimeout, HeadersTooLarge
|  |- BodyTooLarge, UnsupportedMediaType, NotAcceptable
|  |- NotFound, MethodNotAllowed, RolloutNotFound, SegmentNotFound, VersionNotFound, AdapterNotFound
|  |- NoDrafter
|  |- IdempotencyInProgress, IdempotencyMismatch
|  |- TreeClosed
|  |- VersionSuperseded, VersionConflict, BaseUnavailable, RollbackRefused
|  |- KvNotFound, KvGone, KvVersionConflict, RangeNotSatisfiable, ReplicaGone
|  `- WeightsRefused, DigestMismatch, PathRefused
`- ServerSideError                    the server failed or is temporarily unable
   |- Internal, ActivationFailed, InsufficientStorage
   |- NotReady, Draining, Overloaded, EngineGone, VersionUnavailable, DirectoryUnavailable
   `- AdaptersFull
"""

from collections.abc import Mapping
from typing import ClassVar

from coppice.wire.problems import PROBLEMS, Problem, ProblemKind


class ServiceError(Exception):
    """Base class of errors that are answered with a problem document.

    `detail` is shown to the caller: it must not hold paths, addresses, tracebacks or prompts.
    """

    code: ClassVar[str]
    headers: Mapping[str, str] = {}

    def __init__(
        self,
        detail: str | None = None,
        *,
        errors: list[dict[str, str]] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(detail or self.kind().title)
        self.status = self.kind().status
        self.detail = detail
        self.errors = errors
        self.retry_after_seconds = retry_after_seconds

    @classmethod
    def kind(cls) -> ProblemKind:
        return PROBLEMS[cls.code]

    def problem(self, request_id: str | None = None) -> Problem:
        """The problem document.

        Text that UTF-8 cannot encode is escaped: `detail` may hold a file name with such bytes.
        """
        kind = self.kind()
        return Problem(
            type=kind.type,
            title=kind.title,
            status=self.status,
            code=kind.code,
            detail=None if self.detail is None else _encodable(self.detail),
            request_id=request_id,
            retry_after_seconds=self.retry_after_seconds,
            errors=self.errors
            and [{name: _encodable(text) for name, text in fault.items()} for fault in self.errors],
        )


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class CallerError(ServiceError):
    """An error caused by the request."""


class ServerSideError(ServiceError):
    """A server failure, or a temporary inability to serve."""


class MalformedRequest(CallerError):
    code = "malformed_request"


class InvalidJson(CallerError):
    code = "invalid_json"


class InvalidRequest(CallerError):
    code = "invalid_request"

    @classmethod
    def of_parameter(cls, name: str, message: str) -> "InvalidRequest":
        """The error for a header or URL parameter, with its name as the location."""
        return cls(f"{name}: {message}", errors=[{"location": name, "message": message}])


class PromptTooLong(CallerError):
    code = "prompt_too_long"


class NoChatTemplate(CallerError):
    code = "no_chat_template"


class Unsupported(CallerError):
    """A request for a feature that is not supported; `detail` names the alternative.

    A 4xx, because clients of other servers retry requests that get a 5xx.
    """

    code = "unsupported"


class Unauthorized(CallerError):
    code = "unauthorized"
    headers = {"WWW-Authenticate": 'Bearer realm="coppice"'}


class Forbidden(CallerError):
    code = "forbidden"


class QuotaExceeded(CallerError):
    code = "quota_exceeded"


class RequestTimeout(CallerError):
    """The client took too long to send its request.

    The connection is closed, because the rest of the body may still arrive on it.
    """

    code = "request_timeout"
    headers = {"Connection": "close"}


class HeadersTooLarge(CallerError):
    code = "headers_too_large"
    headers = {"Connection": "close"}


class BodyTooLarge(CallerError):
    code = "body_too_large"


class UnsupportedMediaType(CallerError):
    code = "unsupported_media_type"


class NotAcceptable(CallerError):
    code = "not_acceptable"


class NotFound(CallerError):
    code = "not_found"


class MethodNotAllowed(CallerError):
    code = "method_not_allowed"


class RolloutNotFound(CallerError):
    code = "rollout_not_found"


class SegmentNotFound(CallerError):
    code = "segment_not_found"


class TreeClosed(CallerError):
    code = "tree_closed"


class VersionNotFound(CallerError):
    code = "version_not_found"


class NoDrafter(CallerError):
    code = "no_drafter"


class AdapterNotFound(CallerError):
    code = "adapter_not_found"


class IdempotencyInProgress(CallerError):
    code = "idempotency_in_progress"


class IdempotencyMismatch(CallerError):
    code = "idempotency_mismatch"


class VersionSuperseded(CallerError):
    code = "version_superseded"


class VersionConflict(CallerError):
    code = "version_conflict"


class BaseUnavailable(CallerError):
    code = "base_unavailable"


class RollbackRefused(CallerError):
    code = "rollback_refused"


class KvNotFound(CallerError):
    code = "kv_not_found"


class KvGone(CallerError):
    code = "kv_gone"


class KvVersionConflict(CallerError):
    code = "kv_version_conflict"


class RangeNotSatisfiable(CallerError):
    code = "range_not_satisfiable"


class ReplicaGone(CallerError):
    code = "replica_gone"


class WeightsRefused(CallerError):
    code = "weights_refused"


class DigestMismatch(CallerError):
    code = "digest_mismatch"


class PathRefused(CallerError):
    code = "path_refused"


class Internal(ServerSideError):
    code = "internal"


class ActivationFailed(ServerSideError):
    code = "activation_failed"


class InsufficientStorage(ServerSideError):
    code = "insufficient_storage"


class NotReady(ServerSideError):
    code = "not_ready"


class Draining(ServerSideError):
    code = "draining"


class Overloaded(ServerSideError):
    code = "overloaded"


class EngineGone(ServerSideError):
    code = "engine_dead"


class VersionUnavailable(ServerSideError):
    code = "version_unavailable"


class DirectoryUnavailable(ServerSideError):
    code = "directory_unavailable"


class AdaptersFull(ServerSideError):
    code = "adapters_full"
