"""Catalogue of the server's errors by code: status, meaning and action.

The server raises problems by code, serves the catalogue under /problems and documents it in
docs/reference/errors.md; the client maps codes to exceptions.
"""

from coppice.wire.base import AnswerModel

CATALOGUE_PATH = "/problems"


class ProblemKind(AnswerModel):
    """One kind of error of the server. If `retryable`, the same request may succeed later."""

    type: str
    code: str
    status: int
    title: str
    meaning: str
    action: str
    retryable: bool = False


class ProblemCatalogue(AnswerModel):
    """Answer of GET /problems: all kinds of errors of the server, by HTTP status."""

    problems: list[ProblemKind]


class Problem(AnswerModel):
    """Body of an error response: an RFC 9457 document (application/problem+json)."""

    type: str
    title: str
    status: int
    code: str
    detail: str | None = None
    request_id: str | None = None
    retry_after_seconds: float | None = None
    errors: list[dict[str, str]] | None = None


def _kind(
    code: str, status: int, title: str, meaning: str, action: str, *, retryable: bool = False
) -> ProblemKind:
    return ProblemKind(
        type=f"{CATALOGUE_PATH}/{code}",
        code=code,
        status=status,
        title=title,
        meaning=meaning,
        action=action,
        retryable=retryable,
    )


# fmt: off
_KINDS = (
    _kind("malformed_request", 400, "The request is not valid HTTP",
          "The server could not parse the bytes of the request as HTTP/1.1.",
          "Check the client and the proxies in front of the server."),
    _kind("invalid_json", 400, "The body is not valid JSON",
          "The body could not be parsed as one JSON document.",
          "Correct the body; `detail` may give the reason."),
    _kind("unauthorized", 401, "A valid API key is required",
          "The request has no API key, or one that the server does not accept.",
          "Send a key of the keys file: Authorization: Bearer KEY."),
    _kind("forbidden", 403, "The request is not allowed",
          "The API key lacks the role that the route requires, or a web page of another site sent "
          "the request.",
          "Use a key with the role that `detail` names, or do not send it from a web page."),
    _kind("session_exhausted", 403, "The session has reached a limit",
          "The session has as many turns or tokens as it may have.",
          "End the episode. To allow more, raise max_turns or max_tokens_total of the session."),
    _kind("not_found", 404, "No such path",
          "The server has no route or resource at this path.",
          "Check the path. The settings server.compat and server.operators_port decide which "
          "routes exist."),
    _kind("rollout_not_found", 404, "No such rollout",
          "No rollout of this API key with this id is running, or its result is no longer cached.",
          "Check the id, or start the rollout again."),
    _kind("segment_not_found", 404, "No such segment",
          "The tree has no segment with this id; it may have been dropped.",
          "Branch at a segment that the tree still has."),
    _kind("session_not_found", 404, "No such session",
          "No session or group of sessions of this API key with this id is open, or its result is "
          "no longer cached.",
          "Check the id, or create the session again."),
    _kind("version_not_found", 404, "No such weights version",
          "The server has no weights version with this label, or it was deleted.",
          "List the versions with GET /v1/weights, or upload the version again."),
    _kind("no_drafter", 404, "No drafter is configured",
          "The server speculates without a drafter model.",
          "Set speculation.mode to drafter to use one."),
    _kind("adapter_not_found", 404, "No such adapter",
          "No LoRA adapter of this name and version is loaded.",
          "List the adapters with GET /v1/adapters, or load the adapter."),
    _kind("kv_not_found", 404, "No such prompt KV handle",
          "The handle is unknown, or belongs to another API key.",
          "Check the handle, or export the prompt KV again."),
    _kind("method_not_allowed", 405, "The path does not allow this method",
          "The path exists, but not for the method of the request.",
          "Use a method of the Allow header."),
    _kind("not_acceptable", 406, "No acceptable media type",
          "The route supports none of the media types in the Accept header.",
          "Accept a media type that `detail` names."),
    _kind("request_timeout", 408, "The request did not arrive in time",
          "The client sent the request more slowly than limits.read_seconds allows.",
          "Send the request again over a faster connection.",
          retryable=True),
    _kind("idempotency_in_progress", 409, "The first request with this key is still being read",
          "Another request with the same idempotency key is being received.",
          "Repeat the request after a short time.",
          retryable=True),
    _kind("tree_closed", 409, "The tree cannot grow",
          "The lease of the tree has ended, or the tree does not have the mode external.",
          "Start a new rollout, and renew the lease by branching before it ends."),
    _kind("version_superseded", 409, "The weights version is no longer active",
          "The request requires exactly one weights version, which is superseded or unknown.",
          "Request the active version, or a minimum version."),
    _kind("version_conflict", 409, "The weights version is in another state",
          "The state of the weights version does not allow the operation, or the label is used for "
          "other content.",
          "List the versions with GET /v1/weights, and use another label for other content."),
    _kind("asleep", 409, "The engine sleeps",
          "The request needs memory that the engine has released for a trainer, another process "
          "uses the memory for a wake, or the engine sleeps for another API key or in another way. "
          "The detail says which.",
          "Wake the engine first with POST /v1/wake; before a wake, release the trainer's memory."),
    _kind("base_unavailable", 409, "The base of the delta is not available",
          "The server does not have the version that the delta is based on, or has other content "
          "for it.",
          "Upload the full weights."),
    _kind("rollback_refused", 409, "The weights version is older than the active one",
          "Activation of an older version is refused by default.",
          "Repeat the request with allow_rollback: true if the rollback is intended."),
    _kind("kv_version_conflict", 409, "The prompt KV is of another weights version",
          "The prompt KV was computed with another weights version than the request requires.",
          "Compute the prompt KV again with the current weights."),
    _kind("kv_gone", 410, "The prompt KV was released",
          "The lease of the prompt KV has ended, it was released, or its replica has stopped.",
          "Compute the prompt KV again, and renew the lease before it ends."),
    _kind("session_closed", 410, "The session has ended",
          "The session was finished or cancelled, or it has expired. `detail` names the reason.",
          "Create another session."),
    _kind("replica_gone", 410, "The replica has left the cluster",
          "The replica that had the rollout is no longer registered with the cluster.",
          "Start the rollout again."),
    _kind("body_too_large", 413, "The body is too large",
          "The body exceeds a limit of the server.",
          "Send less at once, or raise the limit that `detail` names."),
    _kind("unsupported_media_type", 415, "The media type is not supported",
          "The Content-Type of the body is not supported by the route.",
          "Send a body with the Content-Type that `detail` names."),
    _kind("range_not_satisfiable", 416, "The range is outside the file",
          "The Range header names bytes that the file does not have.",
          "Use the length in the Content-Range header."),
    _kind("unsupported", 422, "Not supported",
          "The server does not have the requested feature.",
          "Use the alternative that `detail` names."),
    _kind("invalid_request", 422, "The request is invalid",
          "A field, parameter or header has a missing or invalid value.",
          "Correct the fields that `errors` lists."),
    _kind("prompt_too_long", 422, "The prompt is too long",
          "The prompt leaves no room for a token in the model's context.",
          "Shorten the prompt, or raise engine.max_context_tokens."),
    _kind("no_chat_template", 422, "The chat template cannot render the messages",
          "The model has no chat template, or its template rejects the messages.",
          "Send a text prompt or token ids, or correct the messages."),
    _kind("weights_refused", 422, "The weights do not match the model",
          "The files are not valid, or their tensors do not match the served model.",
          "Correct the checkpoint; `detail` names the difference."),
    _kind("digest_mismatch", 422, "The content does not match its digest",
          "The received bytes do not match the Content-Digest header.",
          "Upload the file again."),
    _kind("path_refused", 422, "The path is not allowed",
          "The path is not inside a directory of weights.source_directories.",
          "Move the files, or add the directory to the setting."),
    _kind("idempotency_mismatch", 422, "The idempotency key was used for another request",
          "An earlier request with the same idempotency key had another body.",
          "Use a new key for a new request."),
    _kind("quota_exceeded", 429, "The limit of this API key is reached",
          "The API key has as much concurrent work as its limit allows.",
          "Repeat the request after Retry-After, with less in parallel.",
          retryable=True),
    _kind("headers_too_large", 431, "The headers are too large",
          "The request line and the headers exceed 64 KiB.",
          "Send fewer or shorter headers."),
    _kind("internal", 500, "Internal error of the server",
          "An unexpected error occurred; the server's log has the details under the request id.",
          "Report the error with its request id."),
    _kind("activation_failed", 500, "The weights could not be activated",
          "The engine could not load the version; it continues with the previous one, or with the "
          "one that `detail` names.",
          "See the server's log, correct the version, and upload it under another label."),
    _kind("not_ready", 503, "The server is starting",
          "The engine is loading the model, or the server is fetching the active weights.",
          "Repeat the request later.",
          retryable=True),
    _kind("draining", 503, "The server is shutting down",
          "The server finishes its running work and accepts no new work.",
          "Repeat the request at another replica, or after the restart.",
          retryable=True),
    _kind("overloaded", 503, "The server is overloaded",
          "A queue of the server is full.",
          "Repeat the request after Retry-After, or add replicas.",
          retryable=True),
    _kind("adapters_full", 503, "Too many adapters are loaded",
          "The limit engine.max_adapters is reached, and all loaded adapters are in use.",
          "Unload an adapter, or repeat the request after its rollouts have ended.",
          retryable=True),
    _kind("engine_dead", 503, "The engine has stopped",
          "A process of the engine died or hangs; the server must be restarted.",
          "Repeat the request after the restart.",
          retryable=True),
    _kind("version_unavailable", 503, "The weights version is not active yet",
          "The request requires a weights version that is newer than the active one.",
          "Repeat the request after the version is activated.",
          retryable=True),
    _kind("cluster_unavailable", 503, "The cluster registry is not available",
          "The server cannot find out which replica has the rollout.",
          "Repeat the request later.",
          retryable=True),
    _kind("insufficient_storage", 507, "The weights directory is full",
          "The file system of weights.directory has not enough space.",
          "Delete weights versions, or enlarge the file system."),
)


# fmt: on

PROBLEMS: dict[str, ProblemKind] = {kind.code: kind for kind in _KINDS}
