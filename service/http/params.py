"""Parsers of query parameters and of the headers `Accept` and `Prefer`."""

import re
from enum import StrEnum
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError
from starlette.datastructures import QueryParams

from coppice.wire.base import Label
from coppice.wire.packed.requests import PACKED_MEDIA_TYPE
from coppice.wire.pause import DEFAULT_PAUSE_LEASE_SECONDS, PauseLease
from coppice.wire.weights import Sequence
from service.errors import InvalidRequest, NotAcceptable

_LABEL: TypeAdapter[str] = TypeAdapter(Label)
_SEQUENCE: TypeAdapter[int] = TypeAdapter(Sequence)
_LEASE: TypeAdapter[float] = TypeAdapter(PauseLease)
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_NUMBER = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_BOOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
MAX_WAIT_SECONDS = 60.0


def label(text: str, parameter: str = "version") -> str:
    try:
        return _LABEL.validate_python(text)
    except ValidationError as error:
        raise InvalidRequest.of_parameter(
            parameter, "must be 1 to 64 letters, digits, dots, dashes and underscores"
        ) from error


def upload_parameters(query: QueryParams) -> tuple[int | None, str | None]:
    """Query parameters of a weights upload: sequence number, and base version if it is a delta."""
    base = _single_param(query, "base", "sequence")
    return _sequence(_single_param(query, "sequence", "base")), None if base is None else label(
        base
    )


def sequence(query: QueryParams) -> int | None:
    return _sequence(_single_param(query, "sequence"))


def _sequence(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return _SEQUENCE.validate_strings(text if _INTEGER.fullmatch(text) else "")
    except ValidationError as error:
        raise InvalidRequest.of_parameter(
            "sequence", "must be an integer from 0 to 2^53 - 1"
        ) from error


def pause_lease(query: QueryParams, default: float = DEFAULT_PAUSE_LEASE_SECONDS) -> float:
    """Lease of a pause or sleep in vLLM's protocol, in seconds."""
    text = query.get("lease_seconds")
    if text is None:
        return default
    try:
        return _LEASE.validate_strings(text if _NUMBER.fullmatch(text) else "")
    except ValidationError as error:
        raise InvalidRequest.of_parameter(
            "lease_seconds", "must be a number of seconds above 0 and below 2^31"
        ) from error


def boot_id_of(query: QueryParams) -> str | None:
    """Boot id of the caller's host, as in /proc/sys/kernel/random/boot_id."""
    text = _single_param(query, "boot_id")
    if text is not None and not _BOOT_ID.fullmatch(text):
        raise InvalidRequest.of_parameter("boot_id", "must be a UUID in lower case")
    return text


def wait_seconds(query: QueryParams) -> float:
    text = _single_param(query, "wait")
    if text is None:
        return 0.0
    if not _NUMBER.fullmatch(text) or float(text) > MAX_WAIT_SECONDS:
        raise InvalidRequest.of_parameter(
            "wait", f"must be a number of seconds from 0 to {MAX_WAIT_SECONDS:.0f}"
        )
    return float(text)


def resumed_rollout(query: QueryParams) -> str | None:
    """Id of the rollout that a redirected POST /v1/rollouts is to receive."""
    return query.get("resume")


class StreamPosition(NamedTuple):
    """Query parameters of a stream of sessions.

    `group`, or the id of the `replica` whose sessions are streamed, and the sequence after which
    the stream begins.
    """

    group: str | None
    replica: str | None
    after: int


def stream_position(query: QueryParams) -> StreamPosition:
    group = _single_param(query, "group", "after", "replica")
    replica = _single_param(query, "replica", "after", "group")
    after = _single_param(query, "after", "group", "replica")
    if after is not None and not (_INTEGER.fullmatch(after) and 0 <= int(after) < 2**53):
        raise InvalidRequest.of_parameter("after", "must be an integer from 0 to 2^53 - 1")
    if group is not None and replica is not None:
        raise InvalidRequest.of_parameter("replica", "not allowed with group, which is on one")
    return StreamPosition(group, replica, int(after or 0))


def expected_version(query: QueryParams) -> str | None:
    text = _single_param(query, "version")
    return None if text is None else label(text)


def _single_param(query: QueryParams, name: str, *others: str) -> str | None:
    """Value of one query parameter; None if it is absent.

    Raises InvalidRequest if `name` is repeated, or for a parameter other than `name` and `others`.
    """
    unknown = query.keys() - {name, *others}
    if unknown:
        raise InvalidRequest.of_parameter(min(unknown), "unknown query parameter")
    values = query.getlist(name)
    if len(values) > 1:
        raise InvalidRequest.of_parameter(name, "must not be repeated")
    return values[0] if values else None


class ResponseFormat(StrEnum):
    """Media types of a rollout's response."""

    JSON = "application/json"
    NDJSON = "application/x-ndjson"
    PACKED = PACKED_MEDIA_TYPE


def negotiate_format(accept: str | None) -> ResponseFormat:
    """Format of a rollout's response by `Accept`: packed if accepted, else NDJSON, else JSON.

    JSON without `Accept`.
    """
    accepted = {part.partition(";")[0].strip().lower() for part in (accept or "*/*").split(",")}
    for response_format in (ResponseFormat.PACKED, ResponseFormat.NDJSON):
        if response_format in accepted:
            return response_format
    if accepted & {ResponseFormat.JSON, "application/*", "*/*"}:
        return ResponseFormat.JSON
    raise NotAcceptable(f"the route responds with {', '.join(ResponseFormat)}")


def accepts_packed(accept: str | None) -> bool:
    """True if `Accept` names the packed format; JSON is the default."""
    return ResponseFormat.PACKED in (accept or "")


def accepts_file(accept: str | None) -> bool:
    """True if `Accept` allows sending a file's bytes; False if it asks for JSON instead."""
    accepted = {part.partition(";")[0].strip().lower() for part in (accept or "*/*").split(",")}
    if ResponseFormat.JSON in accepted:
        return False
    if accepted & {"application/octet-stream", "application/*", "*/*"}:
        return True
    raise NotAcceptable("the route responds with application/octet-stream, application/json")


def accepts_html(accept: str | None) -> bool:
    """True if `Accept` names HTML and not JSON, as in requests of browsers."""
    accepted = {part.partition(";")[0].strip().lower() for part in (accept or "").split(",")}
    return "text/html" in accepted and ResponseFormat.JSON not in accepted


def prefers_async(prefer: str | None) -> bool:
    """True if `Prefer` holds `respond-async`; unknown preferences are ignored (RFC 7240)."""
    preferences = {part.partition(";")[0].strip().lower() for part in (prefer or "").split(",")}
    return "respond-async" in preferences
