"""/v1/adapters: load or upload, look, unload."""

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from coppice.wire.adapters import LoadAdapterRequest
from service.adapters.loaded_adapter import Held
from service.auth.access import needs
from service.http.bodies import bounded, read_small_json
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
from service.http.responses import JSON, NOTHING, OF_BODY, OF_UPLOAD, WHEN_READY, WITH_KEY, answers
from service.routes.dependencies import ReadyServer
from service.server import Server

router = APIRouter(prefix="/v1/adapters")

ADMIN = (*WITH_KEY, *WHEN_READY)
CHANGED = (
    *(Unsupported, InvalidRequest, VersionConflict, WeightsRefused, ActivationFailed),
    *(AdaptersFull, InsufficientStorage),
)
LOADED = answers({200: JSON, 201: JSON}, *ADMIN, *OF_BODY, *CHANGED, PathRefused)
UPLOADED = answers({200: JSON, 201: JSON}, *ADMIN, *OF_UPLOAD, *CHANGED, DigestMismatch)
UNLOADED = answers({204: NOTHING}, *ADMIN, InvalidRequest, AdapterNotFound)


@router.get("", responses=answers({200: JSON}, *ADMIN))
@needs("admin")
async def loaded(server: ReadyServer) -> Response:
    return _json(server.adapters.answer())


@router.post("/{name}", responses=LOADED)
@needs("admin")
async def load(name: str, request: Request, server: ReadyServer) -> Response:
    body = await read_small_json(request, LoadAdapterRequest)
    work = server.adapters.load(label(name, "name"), body.version, body.path)
    return _changed(server, *await server.in_background(work))


@router.put("/{name}/{version}", responses=UPLOADED)
@needs("admin")
async def upload(name: str, version: str, request: Request, server: ReadyServer) -> Response:
    name, version = label(name, "name"), label(version)
    chunks = bounded(request, limit=server.settings.weights.max_upload_bytes)
    digest = request.headers.get("content-digest")
    incoming = await server.adapters.receive(name, chunks, digest)
    work = server.adapters.add(name, version, incoming)
    return _changed(server, *await server.in_background(work))


@router.delete("/{name}", responses=UNLOADED)
@needs("admin")
async def unload(name: str, server: ReadyServer) -> Response:
    await server.in_background(server.adapters.unload(label(name, "name")))
    return Response(status_code=204)


def _changed(server: Server, held: Held, new: bool) -> Response:
    return _json(server.adapters.answer_of(held), status_code=201 if new else 200)


def _json(answer: BaseModel, *, status_code: int = 200) -> Response:
    return Response(answer.model_dump_json(), status_code, media_type="application/json")
