"""Content negotiation: the `Accept` and `Prefer` headers."""

from enum import StrEnum

from coppice.wire import records
from service.http.errors import NotAcceptable


class ResponseFormat(StrEnum):
    """Media types of a rollout's response."""

    JSON = "application/json"
    NDJSON = "application/x-ndjson"
    PACKED = records.PACKED_MEDIA_TYPE


def negotiate_format(accept: str | None) -> ResponseFormat:
    """The accepted format: packed before NDJSON before JSON; JSON without `Accept`."""
    accepted = {part.partition(";")[0].strip().lower() for part in (accept or "*/*").split(",")}
    for response_format in (ResponseFormat.PACKED, ResponseFormat.NDJSON):
        if response_format in accepted:
            return response_format
    if accepted & {ResponseFormat.JSON, "application/*", "*/*"}:
        return ResponseFormat.JSON
    raise NotAcceptable(f"this server answers {', '.join(ResponseFormat)}")


def accepts_file(accept: str | None) -> bool:
    """True if the file's bytes are accepted; False if `Accept` names JSON."""
    accepted = {part.partition(";")[0].strip().lower() for part in (accept or "*/*").split(",")}
    if ResponseFormat.JSON in accepted:
        return False
    if accepted & {"application/octet-stream", "application/*", "*/*"}:
        return True
    raise NotAcceptable("this server answers application/octet-stream, application/json")


def prefers_async(prefer: str | None) -> bool:
    """True if `Prefer` holds `respond-async`; unknown preferences are ignored (RFC 7240)."""
    preferences = {part.partition(";")[0].strip().lower() for part in (prefer or "").split(",")}
    return "respond-async" in preferences
