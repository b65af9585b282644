"""Routes under /v1/weights: upload, stage, list, activate and delete weights versions.

Other replicas download the uploaded files through the router `files`.
"""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from coppice.wire import cuda_ipc_weights
from coppice.wire.cuda_ipc_weights import TransferRequest
from coppice.wire.weights import ActivateRequest, StageRequest
from engine.weights.ipc_tensors import IpcHandle, IpcTensor, WeightTransfer
from service.auth.access import requires_role
from service.checkpoint_store import DELTA, WRITE_BYTES, validate_file_name
from service.errors import (
    ActivationFailed,
    Asleep,
    BaseUnavailable,
    InvalidRequest,
    PathRefused,
    RollbackRefused,
    Unsupported,
    VersionConflict,
    VersionNotFound,
    WeightsRefused,
)
from service.http.bodies import read_small_json
from service.http.exception_handlers import cancel_on_disconnect
from service.http.params import label, sequence, upload_parameters
from service.http.responses import (
    ADMIN_ERRORS,
    AUTH_ERRORS,
    BODY_ERRORS,
    FILE_ERRORS,
    JSON,
    NO_CONTENT,
    UPLOAD_ERRORS,
    declare_responses,
    json_response,
)
from service.routes.dependencies import AnyServer, ReadyServer, UploadedFile
from service.weights.replication import manifests
from service.weights.stager import IncomingFile
from service.weights_versions import Version

router = APIRouter(prefix="/v1/weights")
files = APIRouter(prefix="/v1/weights")

FILE = "application/octet-stream"
FILE_RESPONSES = declare_responses({200: [FILE]}, *AUTH_ERRORS, VersionNotFound)
UPLOAD_RESPONSES = declare_responses(
    {200: JSON, 201: JSON}, *ADMIN_ERRORS, *UPLOAD_ERRORS, *FILE_ERRORS, BaseUnavailable
)
STAGE_RESPONSES = declare_responses(
    {201: JSON}, *ADMIN_ERRORS, *BODY_ERRORS, PathRefused, WeightsRefused, VersionConflict
)
ACTIVATE_RESPONSES = declare_responses(
    {200: JSON},
    *(*ADMIN_ERRORS, *BODY_ERRORS, VersionNotFound, VersionConflict, RollbackRefused),
    *(WeightsRefused, ActivationFailed, Asleep),
)
TRANSFER_RESPONSES = declare_responses(
    {200: JSON},
    *(*ADMIN_ERRORS, *BODY_ERRORS, Unsupported, VersionNotFound, VersionConflict, RollbackRefused),
    *(WeightsRefused, ActivationFailed, Asleep),
)
DELETE_RESPONSES = declare_responses(
    {204: NO_CONTENT}, *ADMIN_ERRORS, InvalidRequest, VersionNotFound, VersionConflict
)


@router.get("", responses=declare_responses({200: JSON}, *ADMIN_ERRORS))
@requires_role("admin")
async def list_versions(server: ReadyServer) -> Response:
    return json_response(server.replication.answer())


@router.put("/{version}", responses=UPLOAD_RESPONSES)
@requires_role("admin")
async def upload(
    version: str, request: Request, server: ReadyServer, file: UploadedFile
) -> Response:
    number, base = upload_parameters(request.query_params)
    incoming = IncomingFile(label=label(version), sequence=number, digest=file.digest, base=base)
    return _stored_response(*await server.stager.upload(incoming, file.chunks))


@router.put("/{version}/files/{name}", responses=UPLOAD_RESPONSES)
@requires_role("admin")
async def upload_file(
    version: str, name: str, request: Request, server: ReadyServer, file: UploadedFile
) -> Response:
    incoming = IncomingFile(
        label=label(version),
        name=validate_file_name(name),
        sequence=sequence(request.query_params),
        digest=file.digest,
        sharded=True,
    )
    return _stored_response(*await server.stager.upload(incoming, file.chunks))


@router.post("/{version}", responses=STAGE_RESPONSES)
@requires_role("admin")
async def stage(version: str, request: Request, server: ReadyServer) -> Response:
    body = await read_small_json(request, StageRequest)
    staged = await server.stager.stage_path(
        label(version), body.path, sequence=body.sequence, fingerprint=body.fingerprint
    )
    return json_response(staged.answer(), 201)


@router.post("/{version}/activate", responses=ACTIVATE_RESPONSES)
@requires_role("admin")
async def activate(version: str, request: Request, server: ReadyServer) -> Response:
    body = await read_small_json(request, ActivateRequest)
    answer = await server.coordinator.activate(
        label(version), body.mode, allow_rollback=body.allow_rollback, kv=body.kv
    )
    return json_response(answer)


@router.post("/{version}/transfer", responses=TRANSFER_RESPONSES)
@requires_role("admin")
async def transfer(version: str, request: Request, server: ReadyServer) -> Response:
    if server.settings.engine.weight_transfer is None:
        raise Unsupported(
            "engine.weight_transfer is none: publish the weights over HTTP (PUT /v1/weights)"
        )
    name = label(version)
    body = await server.bodies.read_json(request, TransferRequest)
    tensors = await asyncio.to_thread(_tensors, body)
    work = server.transfers.activate(name, body, WeightTransfer(tensors=tensors))
    return json_response(await cancel_on_disconnect(request, work))


@router.delete("/{version}", responses=DELETE_RESPONSES)
@requires_role("admin")
async def delete(version: str, server: ReadyServer) -> Response:
    await server.stager.delete(label(version))
    return Response(status_code=204)


@files.get("/{version}/files/{name}", responses=FILE_RESPONSES)
@requires_role("replica")
async def download(version: str, name: str, server: AnyServer) -> Response:
    path = _path(server.versions.find(version), name)
    if path is None:
        raise VersionNotFound("the weights version has no such file on this replica")
    num_bytes = path.stat().st_size
    return StreamingResponse(
        _chunks(path), media_type=FILE, headers={"Content-Length": str(num_bytes)}
    )


def _tensors(body: TransferRequest) -> list[IpcTensor]:
    return [
        IpcTensor(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            handles={gpu: _handle(handle) for gpu, handle in tensor.handles.items()},
        )
        for tensor in body.tensors
    ]


def _handle(sent: cuda_ipc_weights.IpcHandle) -> IpcHandle:
    return IpcHandle(
        handle=base64.b64decode(sent.handle),
        offset=sent.offset,
        ref_counter=sent.ref_counter,
        ref_counter_offset=sent.ref_counter_offset,
    )


def _stored_response(version: Version, is_new: bool) -> Response:
    return json_response(version.answer(), 201 if is_new else 200)


def _path(version: Version | None, name: str) -> Path | None:
    """Local path of an uploaded file of a weights version; None if there is no such file.

    The name must be one that was recorded at the upload, so that the request cannot choose a path.
    """
    if version is None or version.state == "incomplete":
        return None
    if name in version.digests:
        return version.path / name
    if name == manifests.DELTA and version.delta_sha256 is not None:
        return version.path / DELTA
    return None


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as content:
        while chunk := await asyncio.to_thread(content.read, WRITE_BYTES):
            yield chunk
