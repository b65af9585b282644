"""Everything that this client raises about a server, and nothing else does.

    CoppiceError
      Unsupported               a trainer asks for what is not done here, and what to do instead
      Incomplete                a trainer needs samples that did not come
      TransportError            no usable answer; whether the server did the work is unknown
        ConnectionFailed
        TimedOut
        StreamBroken
          RolloutLost
        KvLost
        BadAnswer
          GatewayFailed
        Redirected
      ProblemError              the server said no, and why
        InvalidRequest
          IdempotencyMismatch
        Unauthorized
        Forbidden
        NotFound
          ReplicaGone
        TreeClosed
        VersionSuperseded
        VersionUnavailable
        VersionConflict
          BaseUnavailable
        KvUnavailable
        WeightsRefused
        RequestTimeout
        RequestInProgress
        QuotaExceeded
        Overloaded
        AdaptersFull
        DirectoryUnavailable
        EngineUnavailable
          Draining
        ServerFailed
          ActivationFailed

What the caller got wrong before anything was sent is a TypeError or a ValueError. Every error
survives pickling, because trainers raise them across processes. None names a key.
"""

from coppice.wire.problems import PROBLEMS, Problem


class CoppiceError(Exception):
    """Any failure of a conversation with a server."""

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later."""
        return False


class Unsupported(CoppiceError):
    """A trainer asks for what is not done here. Nothing was sent; the message says what to do."""


class Incomplete(CoppiceError):
    """A trainer's batch cannot be made up: some of its samples failed."""


class TransportError(CoppiceError):
    """No usable answer came. `unsent`: it is known that nothing was sent."""

    def __init__(self, message: str, *, unsent: bool = False) -> None:
        super().__init__(message)
        self.unsent = unsent

    @property
    def retryable(self) -> bool:
        return True


class ConnectionFailed(TransportError):
    """The server could not be reached, or went away before it answered."""


class TimedOut(TransportError):
    """Nothing was heard for longer than the timeout."""


class StreamBroken(TransportError):
    """A streamed rollout ended without its last record."""


class RolloutLost(StreamBroken):
    """The server has forgotten the rollout whose stream broke, so it cannot be gone on with."""

    @property
    def retryable(self) -> bool:
        return False


class KvLost(TransportError):
    """Prompt KV that had begun to come cannot be had: recompute it."""

    @property
    def retryable(self) -> bool:
        return False


class BadAnswer(TransportError):
    """What answered does not speak this wire: another server, or a proxy's error page."""

    @property
    def retryable(self) -> bool:
        return False


class GatewayFailed(BadAnswer):
    """A proxy's word, 502, 503 or 504, that it did not reach the server."""

    @property
    def retryable(self) -> bool:
        return True


class Redirected(TransportError):
    """The server sent the call on to an address that it was not followed to."""

    def __init__(self, message: str, *, location: str | None = None) -> None:
        super().__init__(message)
        self.location = location

    @property
    def retryable(self) -> bool:
        return False


class ProblemError(CoppiceError):
    """The server answered with a problem; of this very class if its code is newer than us."""

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
        return self.problem.code

    @property
    def status(self) -> int:
        return self.problem.status

    @property
    def detail(self) -> str | None:
        return self.problem.detail

    @property
    def retry_after(self) -> float | None:
        """Seconds, where the server named them."""
        return self.problem.retry_after_seconds

    @property
    def retryable(self) -> bool:
        kind = PROBLEMS.get(self.code)
        return kind is not None and kind.retryable


class InvalidRequest(ProblemError):
    """The request can never succeed as it is."""


class IdempotencyMismatch(InvalidRequest):
    """The idempotency key came with another request before."""


class Unauthorized(ProblemError):
    """The server wants a key, and another one than it was given."""


class Forbidden(ProblemError):
    """The key is known, but may not do this."""


class NotFound(ProblemError):
    """No such rollout, segment, version or address, or no drafter."""


class ReplicaGone(NotFound):
    """The replica that had the rollout has gone: send the rollout again."""


class TreeClosed(ProblemError):
    """The tree's lease is over, or it is not one that is grown from outside."""


class VersionSuperseded(ProblemError):
    """The exact weights version asked for is not served any more."""


class VersionUnavailable(ProblemError):
    """The weights version asked for is not served yet."""


class VersionConflict(ProblemError):
    """The weights version is in a state that does not allow this."""


class BaseUnavailable(VersionConflict):
    """The version that a delta starts from is gone from the server, or another: send it whole."""


class KvUnavailable(ProblemError):
    """The prompt KV is not there, or not of the version asserted: recompute it."""


class WeightsRefused(ProblemError):
    """The weights do not fit, did not arrive whole, or lie where the server may not look."""


class RequestTimeout(ProblemError):
    """The request came too slowly."""


class RequestInProgress(ProblemError):
    """The first request with this idempotency key is still being read."""


class QuotaExceeded(ProblemError):
    """The key has as much running as it may."""


class Overloaded(ProblemError):
    """The server has as much queued as it takes."""


class AdaptersFull(ProblemError):
    """No place for another adapter, until one is unloaded or its last rollout ends."""


class DirectoryUnavailable(ProblemError):
    """Which replica has the rollout cannot be said just now."""


class EngineUnavailable(ProblemError):
    """The engine is starting, or has died."""


class Draining(EngineUnavailable):
    """The server is stopping."""


class ServerFailed(ProblemError):
    """The server failed at something that should have worked."""


class ActivationFailed(ServerFailed):
    """The weights could not be loaded; the previous ones serve on."""


PROBLEM_CLASSES: dict[str, type[ProblemError]] = {
    "malformed_request": InvalidRequest,
    "invalid_json": InvalidRequest,
    "unauthorized": Unauthorized,
    "forbidden": Forbidden,
    "not_found": NotFound,
    "rollout_not_found": NotFound,
    "segment_not_found": NotFound,
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
    "directory_unavailable": DirectoryUnavailable,
    "insufficient_storage": ServerFailed,
}


def error_of(problem: Problem) -> ProblemError:
    """The exception that a problem is raised as."""
    return PROBLEM_CLASSES.get(problem.code, ProblemError)(problem)
