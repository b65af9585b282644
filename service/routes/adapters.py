"""Routes under /v1/adapters: list, load, upload and unload LoRA adapters."""

from fastapi import APIRouter, Request, Response

from coppice.wire.weights import LoadAdapterRequest
from service.auth.access import requires_role
from service.errors import (
    ActivationFailed,
    AdapterNotFound,
    AdaptersFull,
    Asleep,
    InvalidRequest,
    PathRefused,
    Unsupported,
)
from service.http.bodies import read_small_json
from service.http.params import label
from service.http.responses import (
    ADMIN_ERRORS,
    BODY_ERRORS,
    FILE_ERRORS,
    JSON,
    NO_CONTENT,
    UPLOAD_ERRORS,
    declare_responses,
    json_response,
)
from service.routes.dependencies import ReadyServer, UploadedFile

router = APIRouter(prefix="/v1/adapters")

LOAD_ERRORS = (*ADMIN_ERRORS, *FILE_ERRORS, Unsupported, ActivationFailed, AdaptersFull, Asleep)
LOAD_RESPONSES = declare_responses({200: JSON, 201: JSON}, *BODY_ERRORS, *LOAD_ERRORS, PathRefused)
UPLOAD_RESPONSES = declare_responses({200: JSON, 201: JSON}, *UPLOAD_ERRORS, *LOAD_ERRORS)
UNLOAD_RESPONSES = declare_responses(
    {204: NO_CONTENT}, *ADMIN_ERRORS, InvalidRequest, AdapterNotFound
)


@router.get("", responses=declare_responses({200: JSON}, *ADMIN_ERRORS))
@requires_role("admin")
async def list_adapters(server: ReadyServer) -> Response:
    return json_response(server.adapters.answer())


@router.post("/{name}", responses=LOAD_RESPONSES)
@requires_role("admin")
async def load(name: str, request: Request, server: ReadyServer) -> Response:
    body = await read_small_json(request, LoadAdapterRequest)
    server.activation.sleep.check_weights_awake()
    work = server.adapters.load(label(name, "name"), body.version, body.path)
    adapter, is_new = await server.run_to_completion(work)
    return json_response(server.adapters.answer_of(adapter), 201 if is_new else 200)


@router.put("/{name}/{version}", responses=UPLOAD_RESPONSES)
@requires_role("admin")
async def upload(name: str, version: str, server: ReadyServer, file: UploadedFile) -> Response:
    name, version = label(name, "name"), label(version)
    server.activation.sleep.check_weights_awake()
    received = await server.adapters.receive(name, file.chunks, file.digest)
    work = server.adapters.add(name, version, received)
    adapter, is_new = await server.run_to_completion(work)
    return json_response(server.adapters.answer_of(adapter), 201 if is_new else 200)


@router.delete("/{name}", responses=UNLOAD_RESPONSES)
@requires_role("admin")
async def unload(name: str, server: ReadyServer) -> Response:
    await server.run_to_completion(server.adapters.unload(label(name, "name")))
    return Response(status_code=204)
