"""What a request's headers ask for: the form of the answer, and whether to wait for it."""

from enum import StrEnum

from coppice.wire import packed
from service.http.errors import NotAcceptable


class Form(StrEnum):
    """Media types that a rollout can be answered in."""

    JSON = "application/json"
    NDJSON = "application/x-ndjson"
    PACKED = packed.MEDIA_TYPE


def wanted_form(accept: str | None) -> Form:
    """The most special form that is accepted; JSON if the caller does not care."""
    accepted = {part.partition(";")[0].strip().lower() for part in (accept or "*/*").split(",")}
    for form in (Form.PACKED, Form.NDJSON):
        if form in accepted:
            return form
    if accepted & {Form.JSON, "application/*", "*/*"}:
        return Form.JSON
    raise NotAcceptable(f"this server answers {', '.join(Form)}")


def wants_file(accept: str | None) -> bool:
    """The bytes, unless JSON is asked for by name."""
    accepted = {part.partition(";")[0].strip().lower() for part in (accept or "*/*").split(",")}
    if Form.JSON in accepted:
        return False
    if accepted & {"application/octet-stream", "application/*", "*/*"}:
        return True
    raise NotAcceptable("this server answers application/octet-stream, application/json")


def wants_async(prefer: str | None) -> bool:
    """RFC 7240; preferences that we do not know are ignored, as it asks."""
    asked = {part.partition(";")[0].strip().lower() for part in (prefer or "").split(",")}
    return "respond-async" in asked
