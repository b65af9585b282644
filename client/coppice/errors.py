"""Exceptions that the client raises: transport failures and errors reported by the server.

Arguments that are invalid before anything is sent raise TypeError or ValueError. Every error can
be pickled, because trainers raise them across processes. No error message contains an API key.
"""

from coppice.wire.problem_catalogue import PROBLEMS, Problem


class CoppiceError(Exception):
    """Base class of all errors of the client."""

    @property
    def retryable(self) -> bool:
        """True if the call that raised this error may succeed later."""
        return False


class Unsupported(CoppiceError):
    """The TRL or verl integration does not support what the trainer requests.

    Nothing was sent. The message says what to do instead.
    """


class Incomplete(CoppiceError):
    """A trainer's batch is incomplete because some of its samples failed."""


class TransportError(CoppiceError):
    """No usable HTTP response was received.

    `unsent` is True if the request is known not to have been sent.
    """

    def __init__(self, message: str, *, unsent: bool = False) -> None:
        super().__init__(message)
        self.unsent = unsent

    @property
    def retryable(self) -> bool:
        return True


class ConnectionFailed(TransportError):
    """The server was unreachable, or closed the connection before it responded."""


class TimedOut(TransportError):
    """A timeout passed: no data arrived, a rollout still runs, or the server is not ready yet."""


class StreamBroken(TransportError):
    """A rollout stream ended without its end record."""


class RolloutLost(StreamBroken):
    """A rollout stream broke and cannot be resumed: the server no longer has the rollout."""

    @property
    def retryable(self) -> bool:
        return False


class KvLost(TransportError):
    """A prompt-KV download that had started cannot be completed. Recompute the KV."""

    @property
    def retryable(self) -> bool:
        return False


class BadAnswer(TransportError):
    """The response does not follow the wire format, for example an error page of a proxy."""

    @property
    def retryable(self) -> bool:
        return False


class GatewayFailed(BadAnswer):
    """A proxy reported with 502, 503 or 504 that it could not reach the server."""

    @property
    def retryable(self) -> bool:
        return True


class Redirected(TransportError):
    """The server redirected the request to an address that the client does not follow."""

    def __init__(self, message: str, *, location: str | None = None) -> None:
        super().__init__(message)
        self.location = location

    @property
    def retryable(self) -> bool:
        return False


class ProblemError(CoppiceError):
    """The server responded with an error in the form of a problem document (RFC 9457).

    Problem codes that this version of the client does not know are raised as this class itself.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        problem = self.problem
        lines = [f"{problem.code} ({problem.status}): {problem.detail or problem.title}"]
        for error in problem.errors or []:
            lines.append("  " + ", ".join(f"{key}: {value}" for key, value in error.items()))
        return "\n".join(lines)

    @property
    def code(self) -> str:
        """Stable name of the error, see the table of errors."""
        return self.problem.code

    @property
    def status(self) -> int:
        """HTTP status."""
        return self.problem.status

    @property
    def detail(self) -> str | None:
        """Reason in the problem document; text for people."""
        return self.problem.detail

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait before a retry, if the server sent a value."""
        return self.problem.retry_after_seconds

    @property
    def retryable(self) -> bool:
        kind = PROBLEMS.get(self.code)
        return kind is not None and kind.retryable


class InvalidRequest(ProblemError):
    """The request is invalid and will fail again if it is repeated unchanged."""


class IdempotencyMismatch(InvalidRequest):
    """The idempotency key was used before with a different request."""


class Unauthorized(ProblemError):
    """The API key is missing or not valid."""


class Forbidden(ProblemError):
    """The API key is valid but lacks the permission for this operation."""


class NotFound(ProblemError):
    """The server has no such rollout, session, segment, weights version, adapter or path."""


class ReplicaGone(NotFound):
    """The replica that ran the rollout has left the cluster. Submit the rollout again."""


class SessionClosed(ProblemError):
    """The agent session has ended, or has as many turns or tokens as it may have."""


class TreeClosed(ProblemError):
    """The rollout tree takes no branch requests: its lease expired, or its mode forbids them."""


class VersionSuperseded(ProblemError):
    """The exact weights version in the request is no longer served."""


class VersionUnavailable(ProblemError):
    """The weights version in the request is not served yet."""


class VersionConflict(ProblemError):
    """The state of the weights version does not allow this operation."""


class BaseUnavailable(VersionConflict):
    """The server does not have the base version of a weights delta, or has other content for it.

    Upload the full weights instead.
    """


class KvUnavailable(ProblemError):
    """The prompt KV is missing, or of another weights version than requested. Recompute it."""


class WeightsRefused(ProblemError):
    """The weights do not match the model, are incomplete, or are at a path that is not allowed."""


class RequestTimeout(ProblemError):
    """The server did not receive the request in time."""


class RequestInProgress(ProblemError):
    """The server is still reading the first request with this idempotency key."""


class QuotaExceeded(ProblemError):
    """The API key has reached its limit of concurrent work."""


class Overloaded(ProblemError):
    """The queue of the server is full."""


class AdaptersFull(ProblemError):
    """The maximum number of LoRA adapters is loaded, and rollouts use all of them."""


class ClusterUnavailable(ProblemError):
    """The cluster registry is unavailable, so the server cannot find the rollout's replica."""


class EngineUnavailable(ProblemError):
    """The inference engine is starting, or has died."""


class Draining(EngineUnavailable):
    """The server is shutting down."""


class ServerFailed(ProblemError):
    """The server failed internally, or has no disk space for weights."""


class ActivationFailed(ServerFailed):
    """The weights could not be loaded. The server continues with the previous version."""


PROBLEM_CLASSES: dict[str, type[ProblemError]] = {
    "malformed_request": InvalidRequest,
    "invalid_json": InvalidRequest,
    "unauthorized": Unauthorized,
    "forbidden": Forbidden,
    "not_found": NotFound,
    "rollout_not_found": NotFound,
    "segment_not_found": NotFound,
    "session_not_found": NotFound,
    "session_exhausted": SessionClosed,
    "session_closed": SessionClosed,
    "version_not_found": NotFound,
    "no_drafter": NotFound,
    "adapter_not_found": NotFound,
    "kv_not_found": KvUnavailable,
    "method_not_allowed": InvalidRequest,
    "not_acceptable": InvalidRequest,
    "request_timeout": RequestTimeout,
    "idempotency_in_progress": RequestInProgress,
    "tree_closed": TreeClosed,
    "version_superseded": VersionSuperseded,
    "version_conflict": VersionConflict,
    "asleep": VersionConflict,
    "base_unavailable": BaseUnavailable,
    "rollback_refused": VersionConflict,
    "kv_version_conflict": KvUnavailable,
    "kv_gone": KvUnavailable,
    "replica_gone": ReplicaGone,
    "body_too_large": InvalidRequest,
    "unsupported_media_type": InvalidRequest,
    "range_not_satisfiable": InvalidRequest,
    "unsupported": InvalidRequest,
    "invalid_request": InvalidRequest,
    "prompt_too_long": InvalidRequest,
    "no_chat_template": InvalidRequest,
    "weights_refused": WeightsRefused,
    "digest_mismatch": WeightsRefused,
    "path_refused": WeightsRefused,
    "idempotency_mismatch": IdempotencyMismatch,
    "quota_exceeded": QuotaExceeded,
    "headers_too_large": InvalidRequest,
    "internal": ServerFailed,
    "activation_failed": ActivationFailed,
    "not_ready": EngineUnavailable,
    "draining": Draining,
    "overloaded": Overloaded,
    "adapters_full": AdaptersFull,
    "engine_dead": EngineUnavailable,
    "version_unavailable": VersionUnavailable,
    "cluster_unavailable": ClusterUnavailable,
    "insufficient_storage": ServerFailed,
}


def error_of(problem: Problem) -> ProblemError:
    """Returns the exception for a problem document, the body of an error response."""
    return PROBLEM_CLASSES.get(problem.code, ProblemError)(problem)
