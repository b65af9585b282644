"""Routes under /v1/adapters: list, load, upload and unload LoRA adapters."""

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from coppice.wire.weights import LoadAdapterRequest
from service.adapters.manager import LoadedAdapter
from service.auth.access import requires_role
from service.http.bodies import read_small_json, stream_body
from service.http.errors import (
    ActivationFailed,
    AdapterNotFound,
    AdaptersFull,
    DigestMismatch,
    InsufficientStorage,
    InvalidRequest,
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
    NO_CONTENT,
    READINESS_ERRORS,
    UPLOAD_ERRORS,
    declare_responses,
)
from service.routes.dependencies import ReadyServer
from service.server import Server

router = APIRouter(prefix="/v1/adapters")

ADMIN_ERRORS = (*AUTH_ERRORS, *READINESS_ERRORS)
LOAD_ERRORS = (
    *(Unsupported, InvalidRequest, VersionConflict, WeightsRefused, ActivationFailed),
    *(AdaptersFull, InsufficientStorage),
)
LOAD_RESPONSES = declare_responses(
    {200: JSON, 201: JSON}, *ADMIN_ERRORS, *BODY_ERRORS, *LOAD_ERRORS, PathRefused
)
UPLOAD_RESPONSES = declare_responses(
    {200: JSON, 201: JSON}, *ADMIN_ERRORS, *UPLOAD_ERRORS, *LOAD_ERRORS, DigestMismatch
)
UNLOAD_RESPONSES = declare_responses(
    {204: NO_CONTENT}, *ADMIN_ERRORS, InvalidRequest, AdapterNotFound
)


@router.get("", responses=declare_responses({200: JSON}, *ADMIN_ERRORS))
@requires_role("admin")
async def list_adapters(server: ReadyServer) -> Response:
    return _json(server.adapters.answer())


@router.post("/{name}", responses=LOAD_RESPONSES)
@requires_role("admin")
async def load(name: str, request: Request, server: ReadyServer) -> Response:
    body = await read_small_json(request, LoadAdapterRequest)
    work = server.adapters.load(label(name, "name"), body.version, body.path)
    return _changed(server, *await server.run_to_completion(work))


@router.put("/{name}/{version}", responses=UPLOAD_RESPONSES)
@requires_role("admin")
async def upload(name: str, version: str, request: Request, server: ReadyServer) -> Response:
    name, version = label(name, "name"), label(version)
    chunks = stream_body(request, limit=server.settings.weights.max_upload_bytes)
    digest = request.headers.get("content-digest")
    received = await server.adapters.receive(name, chunks, digest)
    work = server.adapters.add(name, version, received)
    return _changed(server, *await server.run_to_completion(work))


@router.delete("/{name}", responses=UNLOAD_RESPONSES)
@requires_role("admin")
async def unload(name: str, server: ReadyServer) -> Response:
    await server.run_to_completion(server.adapters.unload(label(name, "name")))
    return Response(status_code=204)


def _changed(server: Server, adapter: LoadedAdapter, new: bool) -> Response:
    return _json(server.adapters.answer_of(adapter), status_code=201 if new else 200)


def _json(answer: BaseModel, *, status_code: int = 200) -> Response:
    return Response(answer.model_dump_json(), status_code, media_type="application/json")
