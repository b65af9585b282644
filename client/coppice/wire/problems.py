"""Table of errors as RFC 9457 problem documents.

The server raises problems by code, and the client maps codes to exceptions; both use this table.
"""

from typing import NamedTuple

from coppice.wire.base import AnswerModel

TYPE_PREFIX = "urn:coppice:problem:"


class ProblemKind(NamedTuple):
    """One row of the table. A retryable problem may disappear if the request is repeated."""

    code: str
    status: int
    title: str
    retryable: bool = False

    @property
    def type(self) -> str:
        return TYPE_PREFIX + self.code


class Problem(AnswerModel):
    """Body with the media type application/problem+json."""

    type: str
    title: str
    status: int
    code: str
    detail: str | None = None
    request_id: str | None = None
    retry_after_seconds: float | None = None
    errors: list[dict[str, str]] | None = None


_TABLE = (
    ProblemKind("malformed_request", 400, "The bytes are not an HTTP request"),
    ProblemKind("invalid_json", 400, "The body is not JSON"),
    ProblemKind("unauthorized", 401, "A valid key is needed"),
    ProblemKind("forbidden", 403, "This key may not do that"),
    ProblemKind("not_found", 404, "There is nothing at this address"),
    ProblemKind("rollout_not_found", 404, "No such rollout is running or kept"),
    ProblemKind("segment_not_found", 404, "The tree has no such segment"),
    ProblemKind("version_not_found", 404, "No such weights version is known"),
    ProblemKind("no_drafter", 404, "No small model drafts here: see speculation.mode"),
    ProblemKind("adapter_not_found", 404, "No such adapter is loaded"),
    ProblemKind("kv_not_found", 404, "No such prompt KV handle, or not this key's"),
    ProblemKind("method_not_allowed", 405, "This address does not answer this method"),
    ProblemKind("not_acceptable", 406, "None of the accepted media types can be served"),
    ProblemKind("request_timeout", 408, "The request did not arrive in time", retryable=True),
    ProblemKind(
        "idempotency_in_progress",
        409,
        "The request with this key is still being read",
        retryable=True,
    ),
    ProblemKind("tree_closed", 409, "The tree does not grow, or not any more"),
    ProblemKind("version_superseded", 409, "This weights version is not served any more"),
    ProblemKind("version_conflict", 409, "The weights version is in another state than this needs"),
    ProblemKind("base_unavailable", 409, "The base of this delta is not held here, or is another"),
    ProblemKind("rollback_refused", 409, "Going back to older weights needs allow_rollback"),
    ProblemKind("kv_version_conflict", 409, "The prompt KV is of another weights version"),
    ProblemKind("kv_gone", 410, "The lease of this prompt KV is over, or it was released"),
    ProblemKind("replica_gone", 410, "The replica that had this has gone: send the rollout again"),
    ProblemKind("body_too_large", 413, "The body is larger than this server takes"),
    ProblemKind("unsupported_media_type", 415, "The body's media type is not understood"),
    ProblemKind("range_not_satisfiable", 416, "The file has no such bytes"),
    ProblemKind("unsupported", 422, "This server does not do that"),
    ProblemKind("invalid_request", 422, "The request does not say what it must"),
    ProblemKind("prompt_too_long", 422, "The prompt leaves no room for a token"),
    ProblemKind(
        "no_chat_template", 422, "The model has no chat template that renders these messages"
    ),
    ProblemKind("weights_refused", 422, "The weights do not fit the served model"),
    ProblemKind(
        "digest_mismatch", 422, "The bytes that came are not the bytes that were announced"
    ),
    ProblemKind("path_refused", 422, "The path is not inside a configured weights directory"),
    ProblemKind("idempotency_mismatch", 422, "This idempotency key came with another request"),
    ProblemKind("quota_exceeded", 429, "This key has as much running as it may", retryable=True),
    ProblemKind("headers_too_large", 431, "The headers are larger than this server takes"),
    ProblemKind("internal", 500, "The server failed"),
    ProblemKind(
        "activation_failed", 500, "The weights could not be loaded; the previous ones serve on"
    ),
    ProblemKind("not_ready", 503, "The engine is starting", retryable=True),
    ProblemKind("draining", 503, "The server is stopping", retryable=True),
    ProblemKind("overloaded", 503, "The server has as much queued as it takes", retryable=True),
    ProblemKind("adapters_full", 503, "As many adapters as may be are loaded", retryable=True),
    ProblemKind("engine_dead", 503, "The engine has stopped working", retryable=True),
    ProblemKind(
        "version_unavailable", 503, "The weights version is not served yet", retryable=True
    ),
    ProblemKind(
        "directory_unavailable",
        503,
        "Which replica has this cannot be said just now",
        retryable=True,
    ),
    ProblemKind("insufficient_storage", 507, "The weights directory has no room"),
)

PROBLEMS: dict[str, ProblemKind] = {kind.code: kind for kind in _TABLE}
