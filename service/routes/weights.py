"""/v1/weights: upload or stage, look, activate, delete."""

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from coppice.wire.weights import ActivateRequest, StageRequest
from service.auth.access import needs
from service.http.bodies import bounded, read_small_json
from service.http.errors import (
    ActivationFailed,
    BaseUnavailable,
    DigestMismatch,
    InsufficientStorage,
    InvalidRequest,
    PathRefused,
    RollbackRefused,
    VersionConflict,
    VersionNotFound,
    WeightsRefused,
)
from service.http.params import label, sequence, upload_parameters
from service.http.responses import JSON, NOTHING, OF_BODY, OF_UPLOAD, WHEN_READY, WITH_KEY, answers
from service.routes.dependencies import ReadyServer
from service.weights.checkpoint_store import SINGLE, checked_name
from service.weights.versions import Version

router = APIRouter(prefix="/v1/weights")

ADMIN = (*WITH_KEY, *WHEN_READY)
UPLOADED = answers(
    {200: JSON, 201: JSON},
    *(*ADMIN, *OF_UPLOAD, InvalidRequest, VersionConflict, BaseUnavailable),
    *(WeightsRefused, DigestMismatch, InsufficientStorage),
)
STAGED = answers({201: JSON}, *ADMIN, *OF_BODY, PathRefused, WeightsRefused, VersionConflict)
ACTIVATED = answers(
    {200: JSON},
    *(*ADMIN, *OF_BODY, VersionNotFound, VersionConflict, RollbackRefused),
    *(WeightsRefused, ActivationFailed),
)
DELETED = answers({204: NOTHING}, *ADMIN, InvalidRequest, VersionNotFound, VersionConflict)


@router.get("", responses=answers({200: JSON}, *ADMIN))
@needs("admin")
async def known(server: ReadyServer) -> Response:
    return _json(server.fleet_weights.answer())


@router.put("/{version}", responses=UPLOADED)
@needs("admin")
async def upload(version: str, request: Request, server: ReadyServer) -> Response:
    number, base = upload_parameters(request.query_params)
    chunks = bounded(request, limit=server.settings.weights.max_upload_bytes)
    digest = request.headers.get("content-digest")
    if base is not None:
        stored = await server.publisher.upload_delta(
            label(version), base, chunks, sequence=number, digest=digest
        )
    else:
        stored = await server.publisher.upload(
            label(version), SINGLE, chunks, sequence=number, digest=digest, sharded=False
        )
    return _stored(*stored)


@router.put("/{version}/files/{name}", responses=UPLOADED)
@needs("admin")
async def upload_file(version: str, name: str, request: Request, server: ReadyServer) -> Response:
    stored = await server.publisher.upload(
        label(version),
        checked_name(name),
        bounded(request, limit=server.settings.weights.max_upload_bytes),
        sequence=sequence(request.query_params),
        digest=request.headers.get("content-digest"),
        sharded=True,
    )
    return _stored(*stored)


@router.post("/{version}", responses=STAGED)
@needs("admin")
async def stage(version: str, request: Request, server: ReadyServer) -> Response:
    body = await read_small_json(request, StageRequest)
    staged = await server.publisher.stage_path(label(version), body.path, sequence=body.sequence)
    return _json(staged.answer(), status_code=201)


@router.post("/{version}/activate", responses=ACTIVATED)
@needs("admin")
async def activate(version: str, request: Request, server: ReadyServer) -> Response:
    body = await read_small_json(request, ActivateRequest)
    answer = await server.activate(label(version), body.mode, allow_rollback=body.allow_rollback)
    return _json(answer)


@router.delete("/{version}", responses=DELETED)
@needs("admin")
async def delete(version: str, server: ReadyServer) -> Response:
    await server.publisher.delete(label(version))
    return Response(status_code=204)


def _stored(version: Version, new: bool) -> Response:
    return _json(version.answer(), status_code=201 if new else 200)


def _json(answer: BaseModel, *, status_code: int = 200) -> Response:
    return Response(answer.model_dump_json(), status_code, media_type="application/json")
