"""Request bodies: bounded while they are read, parsed by our own models, faults named by place."""

from collections.abc import AsyncIterator
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from service.errors import BodyTooLarge, InvalidJson, InvalidRequest, UnsupportedMediaType

Model = TypeVar("Model", bound=BaseModel)


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
        raise _fault(error) from error


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


def _fault(error: ValidationError) -> InvalidJson | InvalidRequest:
    """Where and what, never the value: prompts do not belong in errors."""
    faults = error.errors(include_input=False, include_url=False, include_context=False)
    if any(fault["type"] == "json_invalid" for fault in faults):
        return InvalidJson()
    listed = [
        {"location": ".".join(map(str, fault["loc"])), "message": fault["msg"]}
        for fault in faults[:16]
    ]
    return InvalidRequest(f"{len(faults)} field(s) are wrong", errors=listed)
