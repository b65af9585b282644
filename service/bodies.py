"""Request bodies: bounded while they are read, parsed by our own models, faults named by place."""

import json
from collections.abc import AsyncIterator
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from service.errors import BodyTooLarge, InvalidJson, InvalidRequest, UnsupportedMediaType

Model = TypeVar("Model", bound=BaseModel)

MAX_FAULTS = 1000


async def read_json(request: Request, model: type[Model], *, limit: int) -> Model:
    return parse(await read(request, limit=limit), model)


async def read(request: Request, *, limit: int) -> bytes:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if media_type.lower() != "application/json":
        raise UnsupportedMediaType("send application/json")
    return b"".join([chunk async for chunk in bounded(request, limit=limit)])


def parse(body: bytes, model: type[Model]) -> Model:
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        if _may_hold_whole_floats(error):
            return _parse_whole_floats(body, model)
        raise fault(error) from error


def _parse_whole_floats(body: bytes, model: type[Model]) -> Model:
    """To JSON Schema 56.0 is an integer, to pydantic it is not. Whoever sends such pays for it."""
    try:
        return model.model_validate(json.loads(body, parse_float=_number))
    except ValidationError as error:
        raise fault(error) from error


def _number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number


async def bounded(request: Request, *, limit: int) -> AsyncIterator[bytes]:
    """The body's chunks, refused as soon as they are known to be too many."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(f"at most {limit} bytes are taken")
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > limit:
            raise BodyTooLarge(f"at most {limit} bytes are taken")
        yield chunk


def _may_hold_whole_floats(error: ValidationError) -> bool:
    return any(fault["type"] == "int_type" for fault in _faults(error))


def fault(error: ValidationError) -> InvalidJson | InvalidRequest:
    """Where and what, never the value: prompts do not belong in errors."""
    faults = _faults(error)
    if any(fault["type"] == "json_invalid" for fault in faults):
        return InvalidJson()
    listed = [
        {"location": ".".join(map(str, fault["loc"])), "message": fault["msg"]}
        for fault in faults[:16]
    ]
    return InvalidRequest(f"{error.error_count()} field(s) are wrong", errors=listed or None)


def _faults(error: ValidationError) -> list[ErrorDetails]:
    """None if they are too many: pydantic lists all or nothing, at 2 us each."""
    if error.error_count() > MAX_FAULTS:
        return []
    return error.errors(include_input=False, include_url=False, include_context=False)
