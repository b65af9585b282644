"""Exception classes of the service, each converted to one type of RFC 9457 problem document."""

from collections.abc import Mapping
from typing import ClassVar

from coppice.wire.problem_catalogue import PROBLEMS, Problem, ProblemKind

DRAINING_RETRY_SECONDS = 5.0
"""Retry-After of requests that a draining replica refuses."""


class ServiceError(Exception):
    """Base class of exceptions that are answered with an RFC 9457 problem document.

    `detail` is shown to the caller: it must not hold paths, addresses, tracebacks or prompts.
    """

    kind: ClassVar[ProblemKind]
    headers: Mapping[str, str] = {}

    def __init_subclass__(cls, *, code: str | None = None) -> None:
        super().__init_subclass__()
        if code is not None:
            cls.kind = PROBLEMS[code]

    def __init__(
        self,
        detail: str | None = None,
        *,
        errors: list[dict[str, str]] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(detail or self.kind.title)
        self.status = self.kind.status
        self.detail = detail
        self.errors = errors
        self.retry_after_seconds = retry_after_seconds

    def problem(self, request_id: str | None = None) -> Problem:
        """RFC 9457 problem document that describes this error to the client.

        Text that UTF-8 cannot encode is escaped: `detail` may hold a file name with such bytes.
        """
        return Problem(
            type=self.kind.type,
            title=self.kind.title,
            status=self.status,
            code=self.kind.code,
            detail=None if self.detail is None else _encodable(self.detail),
            request_id=request_id,
            retry_after_seconds=self.retry_after_seconds,
            errors=self.errors
            and [{name: _encodable(text) for name, text in fault.items()} for fault in self.errors],
        )


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class InvalidRequest(ServiceError, code="invalid_request"):
    @classmethod
    def of_parameter(cls, name: str, message: str) -> "InvalidRequest":
        """Error about a header or URL parameter, whose name is the location of the error."""
        return cls(f"{name}: {message}", errors=[{"location": name, "message": message}])


class Unsupported(ServiceError, code="unsupported"):
    """A request for a feature that is not supported; `detail` names the alternative.

    A 4xx, because clients of other servers retry requests that get a 5xx.
    """


class Unauthorized(ServiceError, code="unauthorized"):
    headers = {"WWW-Authenticate": 'Bearer realm="coppice"'}


class RequestTimeout(ServiceError, code="request_timeout"):
    """The client took too long to send its request.

    The connection is closed, because the rest of the body may still arrive on it.
    """

    headers = {"Connection": "close"}


class HeadersTooLarge(ServiceError, code="headers_too_large"):
    headers = {"Connection": "close"}


# fmt: off
class MalformedRequest(ServiceError, code="malformed_request"): ...
class InvalidJson(ServiceError, code="invalid_json"): ...
class PromptTooLong(ServiceError, code="prompt_too_long"): ...
class NoChatTemplate(ServiceError, code="no_chat_template"): ...
class Forbidden(ServiceError, code="forbidden"): ...
class QuotaExceeded(ServiceError, code="quota_exceeded"): ...
class BodyTooLarge(ServiceError, code="body_too_large"): ...
class UnsupportedMediaType(ServiceError, code="unsupported_media_type"): ...
class NotAcceptable(ServiceError, code="not_acceptable"): ...
class NotFound(ServiceError, code="not_found"): ...
class MethodNotAllowed(ServiceError, code="method_not_allowed"): ...
class RolloutNotFound(ServiceError, code="rollout_not_found"): ...
class SegmentNotFound(ServiceError, code="segment_not_found"): ...
class SessionNotFound(ServiceError, code="session_not_found"): ...
class SessionClosed(ServiceError, code="session_closed"): ...
class SessionExhausted(ServiceError, code="session_exhausted"): ...
class TreeClosed(ServiceError, code="tree_closed"): ...
class VersionNotFound(ServiceError, code="version_not_found"): ...
class NoDrafter(ServiceError, code="no_drafter"): ...
class AdapterNotFound(ServiceError, code="adapter_not_found"): ...
class IdempotencyInProgress(ServiceError, code="idempotency_in_progress"): ...
class IdempotencyMismatch(ServiceError, code="idempotency_mismatch"): ...
class VersionSuperseded(ServiceError, code="version_superseded"): ...
class VersionConflict(ServiceError, code="version_conflict"): ...
class Asleep(ServiceError, code="asleep"): ...
class BaseUnavailable(ServiceError, code="base_unavailable"): ...
class RollbackRefused(ServiceError, code="rollback_refused"): ...
class KvNotFound(ServiceError, code="kv_not_found"): ...
class KvGone(ServiceError, code="kv_gone"): ...
class KvVersionConflict(ServiceError, code="kv_version_conflict"): ...
class RangeNotSatisfiable(ServiceError, code="range_not_satisfiable"): ...
class ReplicaGone(ServiceError, code="replica_gone"): ...
class WeightsRefused(ServiceError, code="weights_refused"): ...
class DigestMismatch(ServiceError, code="digest_mismatch"): ...
class PathRefused(ServiceError, code="path_refused"): ...
class Internal(ServiceError, code="internal"): ...
class ActivationFailed(ServiceError, code="activation_failed"): ...
class InsufficientStorage(ServiceError, code="insufficient_storage"): ...
class NotReady(ServiceError, code="not_ready"): ...
class Draining(ServiceError, code="draining"): ...
class Overloaded(ServiceError, code="overloaded"): ...
class EngineGone(ServiceError, code="engine_dead"): ...
class VersionUnavailable(ServiceError, code="version_unavailable"): ...
class ClusterUnavailable(ServiceError, code="cluster_unavailable"): ...
class AdaptersFull(ServiceError, code="adapters_full"): ...
# fmt: on


class RedirectToReplica(Exception):
    """Raised if a requested resource is on another replica, whose base URL is `url`.

    `query` replaces the query of the request.
    """

    def __init__(self, url: str, *, query: str | None = None) -> None:
        super().__init__(url)
        self.url = url
        self.query = query
