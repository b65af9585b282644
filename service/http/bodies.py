"""Reading and parsing of request bodies, with size limits and errors that name the field.

Small bodies are parsed on the event loop. Larger ones are parsed in a thread, in bounded steps
(service/http/incremental_json_parser.py), because pydantic holds the GIL for a whole call.
"""

from collections.abc import AsyncIterator
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from service.config.settings import LimitsSettings
from service.http.errors import BodyTooLarge, InvalidJson, InvalidRequest, UnsupportedMediaType
from service.http.fair_executor import FairExecutor, QueueLimits, QueueName
from service.http.incremental_json_parser import JsonLimits, read_value

Model = TypeVar("Model", bound=BaseModel)

MAX_FIELD_ERRORS = 1000
INLINE_BYTES = 64 * 2**10
"""Size of the largest request body that is parsed on the event loop, in bytes.

Parsing this many bytes takes about 1 ms; a hand-over to a thread costs about 0.1 ms per request.
"""
WAITING_BODIES_PER_KEY = 4
WAITING_BODIES = 8
"""Limits of the parser's queue, in request bodies of the maximum size."""


class Bodies:
    """Reads and parses request bodies. Owns a thread for large bodies, which `close` ends."""

    def __init__(self, limits: LimitsSettings) -> None:
        self._max_bytes = limits.max_body_bytes
        self._json = JsonLimits(
            values=limits.max_json_values, containers=limits.max_json_containers
        )
        queue = QueueLimits(
            key_bytes=WAITING_BODIES_PER_KEY * self._max_bytes,
            total_bytes=WAITING_BODIES * self._max_bytes,
        )
        self._parser = FairExecutor("json", queue)

    def close(self) -> None:
        self._parser.close()

    async def read_json(
        self, request: Request, model: type[Model], *, limit: int | None = None
    ) -> Model:
        return await self.parsed(await self.content(request, limit=limit), model)

    async def content(self, request: Request, *, limit: int | None = None) -> bytes:
        most = self._max_bytes if limit is None else min(limit, self._max_bytes)
        return await read_body(request, limit=most)

    async def parsed(self, body: bytes, model: type[Model]) -> Model:
        if len(body) <= INLINE_BYTES:
            return parse(body, model)
        return await self._parser.run(
            QueueName.of_caller("bodies"),
            len(body),
            lambda: parse_in_steps(body, model, self._json),
        )


async def read_small_json(request: Request, model: type[Model]) -> Model:
    """Read and parse a small JSON request body, of at most `INLINE_BYTES`."""
    return parse(await read_body(request, limit=INLINE_BYTES), model)


async def read_body(request: Request, *, limit: int) -> bytes:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if media_type.lower() != "application/json":
        raise UnsupportedMediaType("the Content-Type of the body must be application/json")
    return b"".join([chunk async for chunk in stream_body(request, limit=limit)])


def parse(body: bytes, model: type[Model]) -> Model:
    """Parse a small JSON request body in one pydantic call."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise fault(error) from error


def parse_in_steps(body: bytes, model: type[Model], limits: JsonLimits) -> Model:
    try:
        return model.model_validate(read_value(body, limits))
    except ValidationError as error:
        raise fault(error) from error


async def stream_body(request: Request, *, limit: int) -> AsyncIterator[bytes]:
    """Yields the chunks of a request body; raises BodyTooLarge if the body exceeds `limit`.

    Raises as early as possible: before the first chunk if Content-Length exceeds the limit, or if
    the body is compressed.
    """
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType("compressed bodies are not accepted: send no Content-Encoding")
    content_length = request.headers.get("content-length", "0")
    if content_length.isdecimal() and int(content_length) > limit:
        raise BodyTooLarge(f"the body exceeds the limit of {limit} bytes")
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > limit:
            raise BodyTooLarge(f"the body exceeds the limit of {limit} bytes")
        yield chunk


def fault(error: ValidationError) -> InvalidJson | InvalidRequest:
    """Convert a pydantic error to an error response with the locations of invalid fields.

    Never includes values, because they may be prompts.
    """
    field_errors = _field_errors(error)
    if any(fault["type"] == "json_invalid" for fault in field_errors):
        return InvalidJson()
    listed = [
        {"location": ".".join(map(str, fault["loc"])), "message": fault["msg"]}
        for fault in field_errors[:16]
    ]
    return InvalidRequest(f"{error.error_count()} field(s) are invalid", errors=listed or None)


def _field_errors(error: ValidationError) -> list[ErrorDetails]:
    """Pydantic's errors by field; an empty list if there are more than `MAX_FIELD_ERRORS`.

    pydantic lists either all errors or none, at 2 us each.
    """
    if error.error_count() > MAX_FIELD_ERRORS:
        return []
    return error.errors(include_input=False, include_url=False, include_context=False)
