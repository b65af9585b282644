"""LoRA adapters, as vLLM's, prime-rl's and SGLang's clients load and unload them.

They name no version, so every other content of a name is its next one. What a name has already is
taken for a call that was sent again, and changes nothing.
"""

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field
from pydantic_core import to_json

from service.adapters.loaded_adapter import Held
from service.auth.access import needs
from service.compat.bodies import ForeignModel, read_foreign
from service.compat.openapi_document import body_of
from service.http.errors import (
    ActivationFailed,
    AdapterNotFound,
    AdaptersFull,
    InsufficientStorage,
    PathRefused,
    Unsupported,
    VersionConflict,
    WeightsRefused,
)
from service.http.params import label
from service.http.responses import JSON, OF_BODY, WHEN_READY, WITH_KEY, answers
from service.routes.dependencies import ReadyServer
from service.server import Server

router = APIRouter()

ADMIN = (*WITH_KEY, *WHEN_READY, *OF_BODY)
CHANGED = (
    *(Unsupported, PathRefused, VersionConflict, WeightsRefused, ActivationFailed),
    *(AdaptersFull, InsufficientStorage),
)
TEXT = ("text/plain",)


class LoadBody(ForeignModel):
    """`load_inplace`: in the place of what has the name already, which otherwise is refused."""

    lora_name: str
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadBody(ForeignModel):
    lora_name: str


@router.post(
    "/v1/load_lora_adapter",
    responses=answers({200: TEXT}, *ADMIN, *CHANGED),
    openapi_extra=body_of(LoadBody),
)
@needs("admin")
async def load(request: Request, server: ReadyServer) -> Response:
    """vLLM's own, which answers a sentence."""
    body = await read_foreign(request, LoadBody, server)
    await _load(server, body, replace=body.load_inplace)
    return _text(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    responses=answers({200: TEXT}, *ADMIN, AdapterNotFound),
    openapi_extra=body_of(UnloadBody),
)
@needs("admin")
async def unload(request: Request, server: ReadyServer) -> Response:
    body = await read_foreign(request, UnloadBody, server)
    await _unload(server, body)
    return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post(
    "/load_lora_adapter",
    responses=answers({200: JSON}, *ADMIN, *CHANGED),
    openapi_extra=body_of(LoadBody),
)
@needs("admin")
async def load_next(request: Request, server: ReadyServer) -> Response:
    """prime-rl's and SGLang's: trainers that have one name for all of their steps."""
    body = await read_foreign(request, LoadBody, server)
    held = await _load(server, body, replace=True)
    return _json({"status": "ok", **_loaded(server), "adapter_version": held.version})


@router.post(
    "/unload_lora_adapter",
    responses=answers({200: JSON}, *ADMIN, AdapterNotFound),
    openapi_extra=body_of(UnloadBody),
)
@needs("admin")
async def unload_named(request: Request, server: ReadyServer) -> Response:
    await _unload(server, await read_foreign(request, UnloadBody, server))
    return _json({"status": "ok", **_loaded(server)})


async def _load(server: Server, body: LoadBody, *, replace: bool) -> Held:
    name = label(body.lora_name, "lora_name")
    work = server.adapters.load(name, None, body.lora_path, replace=replace)
    held, _ = await server.in_background(work)
    return held


async def _unload(server: Server, body: UnloadBody) -> None:
    work = server.adapters.unload(label(body.lora_name, "lora_name"))
    await server.in_background(work)


def _loaded(server: Server) -> dict[str, object]:
    return {
        "success": True,
        "loaded_adapters": {held.name: held.label for held in server.adapters.current()},
    }


def _text(sentence: str) -> Response:
    return Response(sentence, media_type="text/plain")


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")
