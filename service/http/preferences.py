"""What a request's headers ask for: the form of the answer, and whether to wait for it."""

from enum import StrEnum

from coppice.wire import packed
from service.http.errors import NotAcceptable


class ResponseFormat(StrEnum):
    """Media types that a rollout can be answered in."""

    JSON = "application/json"
    NDJSON = "application/x-ndjson"
    PACKED = packed.MEDIA_TYPE


def negotiate_format(accept: str | None) -> ResponseFormat:
    """The most special form that is accepted; JSON if the caller does not care."""
    accepted = {part.partition(";")[0].strip().lower() for part in (accept or "*/*").split(",")}
    for response_format in (ResponseFormat.PACKED, ResponseFormat.NDJSON):
        if response_format in accepted:
            return response_format
    if accepted & {ResponseFormat.JSON, "application/*", "*/*"}:
        return ResponseFormat.JSON
    raise NotAcceptable(f"this server answers {', '.join(ResponseFormat)}")


def accepts_file(accept: str | None) -> bool:
    """The bytes, unless JSON is asked for by name."""
    accepted = {part.partition(";")[0].strip().lower() for part in (accept or "*/*").split(",")}
    if ResponseFormat.JSON in accepted:
        return False
    if accepted & {"application/octet-stream", "application/*", "*/*"}:
        return True
    raise NotAcceptable("this server answers application/octet-stream, application/json")


def prefers_async(prefer: str | None) -> bool:
    """RFC 7240; preferences that we do not know are ignored, as it asks."""
    preferences = {part.partition(";")[0].strip().lower() for part in (prefer or "").split(",")}
    return "respond-async" in preferences
