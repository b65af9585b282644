"""Routes under /v1/weights: upload, stage, list, activate and delete weights versions."""

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from coppice.wire.weights import ActivateRequest, StageRequest
from service.auth.access import requires_role
from service.http.bodies import read_small_json, stream_body
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
from service.weights.checkpoint_store import SINGLE_FILE, validate_file_name
from service.weights.versions import Version

router = APIRouter(prefix="/v1/weights")

ADMIN_ERRORS = (*AUTH_ERRORS, *READINESS_ERRORS)
UPLOAD_RESPONSES = declare_responses(
    {200: JSON, 201: JSON},
    *(*ADMIN_ERRORS, *UPLOAD_ERRORS, InvalidRequest, VersionConflict, BaseUnavailable),
    *(WeightsRefused, DigestMismatch, InsufficientStorage),
)
STAGE_RESPONSES = declare_responses(
    {201: JSON}, *ADMIN_ERRORS, *BODY_ERRORS, PathRefused, WeightsRefused, VersionConflict
)
ACTIVATE_RESPONSES = declare_responses(
    {200: JSON},
    *(*ADMIN_ERRORS, *BODY_ERRORS, VersionNotFound, VersionConflict, RollbackRefused),
    *(WeightsRefused, ActivationFailed),
)
DELETE_RESPONSES = declare_responses(
    {204: NO_CONTENT}, *ADMIN_ERRORS, InvalidRequest, VersionNotFound, VersionConflict
)


@router.get("", responses=declare_responses({200: JSON}, *ADMIN_ERRORS))
@requires_role("admin")
async def list_versions(server: ReadyServer) -> Response:
    return _json(server.replication.answer())


@router.put("/{version}", responses=UPLOAD_RESPONSES)
@requires_role("admin")
async def upload(version: str, request: Request, server: ReadyServer) -> Response:
    number, base = upload_parameters(request.query_params)
    chunks = stream_body(request, limit=server.settings.weights.max_upload_bytes)
    digest = request.headers.get("content-digest")
    if base is not None:
        stored = await server.stager.upload_delta(
            label(version), base, chunks, sequence=number, digest=digest
        )
    else:
        stored = await server.stager.upload(
            label(version), SINGLE_FILE, chunks, sequence=number, digest=digest, sharded=False
        )
    return _stored_response(*stored)


@router.put("/{version}/files/{name}", responses=UPLOAD_RESPONSES)
@requires_role("admin")
async def upload_file(version: str, name: str, request: Request, server: ReadyServer) -> Response:
    stored = await server.stager.upload(
        label(version),
        validate_file_name(name),
        stream_body(request, limit=server.settings.weights.max_upload_bytes),
        sequence=sequence(request.query_params),
        digest=request.headers.get("content-digest"),
        sharded=True,
    )
    return _stored_response(*stored)


@router.post("/{version}", responses=STAGE_RESPONSES)
@requires_role("admin")
async def stage(version: str, request: Request, server: ReadyServer) -> Response:
    body = await read_small_json(request, StageRequest)
    staged = await server.stager.stage_path(label(version), body.path, sequence=body.sequence)
    return _json(staged.answer(), status_code=201)


@router.post("/{version}/activate", responses=ACTIVATE_RESPONSES)
@requires_role("admin")
async def activate(version: str, request: Request, server: ReadyServer) -> Response:
    body = await read_small_json(request, ActivateRequest)
    answer = await server.coordinator.activate(
        label(version), body.mode, allow_rollback=body.allow_rollback
    )
    return _json(answer)


@router.delete("/{version}", responses=DELETE_RESPONSES)
@requires_role("admin")
async def delete(version: str, server: ReadyServer) -> Response:
    await server.stager.delete(label(version))
    return Response(status_code=204)


def _stored_response(version: Version, new: bool) -> Response:
    return _json(version.answer(), status_code=201 if new else 200)


def _json(answer: BaseModel, *, status_code: int = 200) -> Response:
    return Response(answer.model_dump_json(), status_code, media_type="application/json")
