"""Routes that load and unload LoRA adapters for the clients of vLLM, prime-rl and SGLang.

These clients send no version, so different content under a known name becomes its next version.
Content that the name already has is treated as a retry and changes nothing.
"""

from typing import Annotated

from fastapi import APIRouter, Request, Response
from pydantic import Field
from pydantic_core import to_json

from service.adapters.manager import LoadedAdapter
from service.auth.access import requires_role
from service.compat.bodies import CompatModel, read_compat_body
from service.compat.openapi_document import request_body
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
from service.http.responses import (
    AUTH_ERRORS,
    BODY_ERRORS,
    JSON,
    READINESS_ERRORS,
    declare_responses,
)
from service.routes.dependencies import ReadyServer
from service.server import Server

router = APIRouter()

ADMIN_ERRORS = (*AUTH_ERRORS, *READINESS_ERRORS, *BODY_ERRORS)
LOAD_ERRORS = (
    *(Unsupported, PathRefused, VersionConflict, WeightsRefused, ActivationFailed),
    *(AdaptersFull, InsufficientStorage),
)
TEXT = ("text/plain",)


class LoadBody(CompatModel):
    """Body of a load request.

    `load_inplace` replaces an adapter of the same name; without it a name in use is rejected.
    """

    lora_name: str
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadBody(CompatModel):
    lora_name: str


@router.post(
    "/v1/load_lora_adapter",
    responses=declare_responses({200: TEXT}, *ADMIN_ERRORS, *LOAD_ERRORS),
    openapi_extra=request_body(LoadBody),
)
@requires_role("admin")
async def load(request: Request, server: ReadyServer) -> Response:
    """Load an adapter as vLLM does; the answer is plain text."""
    body = await read_compat_body(request, LoadBody, server)
    await _load(server, body, replace=body.load_inplace)
    return _text(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter",
    responses=declare_responses({200: TEXT}, *ADMIN_ERRORS, AdapterNotFound),
    openapi_extra=request_body(UnloadBody),
)
@requires_role("admin")
async def unload(request: Request, server: ReadyServer) -> Response:
    body = await read_compat_body(request, UnloadBody, server)
    await _unload(server, body)
    return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post(
    "/load_lora_adapter",
    responses=declare_responses({200: JSON}, *ADMIN_ERRORS, *LOAD_ERRORS),
    openapi_extra=request_body(LoadBody),
)
@requires_role("admin")
async def load_replacing(request: Request, server: ReadyServer) -> Response:
    """Load or replace an adapter, for prime-rl and SGLang.

    Their trainers use one name for the adapters of all steps.
    """
    body = await read_compat_body(request, LoadBody, server)
    adapter = await _load(server, body, replace=True)
    return _json({"status": "ok", **_loaded_adapters(server), "adapter_version": adapter.version})


@router.post(
    "/unload_lora_adapter",
    responses=declare_responses({200: JSON}, *ADMIN_ERRORS, AdapterNotFound),
    openapi_extra=request_body(UnloadBody),
)
@requires_role("admin")
async def unload_sglang(request: Request, server: ReadyServer) -> Response:
    await _unload(server, await read_compat_body(request, UnloadBody, server))
    return _json({"status": "ok", **_loaded_adapters(server)})


async def _load(server: Server, body: LoadBody, *, replace: bool) -> LoadedAdapter:
    name = label(body.lora_name, "lora_name")
    work = server.adapters.load(name, None, body.lora_path, replace=replace)
    adapter, _ = await server.run_to_completion(work)
    return adapter


async def _unload(server: Server, body: UnloadBody) -> None:
    work = server.adapters.unload(label(body.lora_name, "lora_name"))
    await server.run_to_completion(work)


def _loaded_adapters(server: Server) -> dict[str, object]:
    return {
        "success": True,
        "loaded_adapters": {adapter.name: adapter.label for adapter in server.adapters.current()},
    }


def _text(message: str) -> Response:
    return Response(message, media_type="text/plain")


def _json(value: object) -> Response:
    return Response(to_json(value), media_type="application/json")
