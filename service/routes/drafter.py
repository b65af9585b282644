"""Routes under /v1/drafter: status, download and upload of the drafter."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import BinaryIO

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from service.auth.access import requires_role
from service.http.bodies import stream_body
from service.http.errors import (
    DigestMismatch,
    InsufficientStorage,
    InvalidRequest,
    NoDrafter,
    NotAcceptable,
    VersionConflict,
    WeightsRefused,
)
from service.http.params import label
from service.http.preferences import accepts_file
from service.http.responses import (
    AUTH_ERRORS,
    JSON,
    READINESS_ERRORS,
    UPLOAD_ERRORS,
    declare_responses,
)
from service.routes.dependencies import ReadyServer
from service.weights.checkpoint_store import WRITE_BYTES

router = APIRouter(prefix="/v1/drafter")

MEDIA_TYPE = "application/octet-stream"
VERSION_HEADER = "Coppice-Drafter-Version"
GET_RESPONSES = declare_responses(
    {200: [*JSON, MEDIA_TYPE]}, *AUTH_ERRORS, *READINESS_ERRORS, NoDrafter, NotAcceptable
)
UPLOAD_RESPONSES = declare_responses(
    {202: JSON},
    *(*AUTH_ERRORS, *READINESS_ERRORS, *UPLOAD_ERRORS, InvalidRequest, NoDrafter, VersionConflict),
    *(WeightsRefused, DigestMismatch, InsufficientStorage),
)


@router.get("", responses=GET_RESPONSES)
@requires_role("admin")
async def drafter(request: Request, server: ReadyServer) -> Response:
    if not accepts_file(request.headers.get("accept")):
        answer = server.drafters.answer()
        return Response(answer.model_dump_json(), media_type="application/json")
    version, path = server.drafters.serving()
    # Opened now: the open file keeps its content even if the path is replaced or deleted.
    content = path.open("rb")
    num_bytes = os.fstat(content.fileno()).st_size
    return StreamingResponse(
        _chunks(content),
        media_type=MEDIA_TYPE,
        headers={"Content-Length": str(num_bytes), VERSION_HEADER: version},
    )


@router.put("/{version}", responses=UPLOAD_RESPONSES)
@requires_role("admin")
async def upload(version: str, request: Request, server: ReadyServer) -> Response:
    answer = await server.drafters.upload(
        label(version),
        stream_body(request, limit=server.settings.weights.max_upload_bytes),
        digest=request.headers.get("content-digest"),
    )
    return Response(answer.model_dump_json(), status_code=202, media_type="application/json")


async def _chunks(content: BinaryIO) -> AsyncIterator[bytes]:
    with content:
        while chunk := await asyncio.to_thread(content.read, WRITE_BYTES):
            yield chunk
