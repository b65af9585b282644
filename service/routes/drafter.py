"""Routes under /v1/drafter: status, download and upload of the drafter model."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import BinaryIO

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from service.auth.access import requires_role
from service.checkpoint_store import WRITE_BYTES
from service.errors import (
    NoDrafter,
    NotAcceptable,
)
from service.http.params import accepts_file, label
from service.http.responses import (
    ADMIN_ERRORS,
    FILE_ERRORS,
    JSON,
    UPLOAD_ERRORS,
    declare_responses,
    json_response,
)
from service.routes.dependencies import ReadyServer, UploadedFile

router = APIRouter(prefix="/v1/drafter")

MEDIA_TYPE = "application/octet-stream"
VERSION_HEADER = "Coppice-Drafter-Version"
GET_RESPONSES = declare_responses(
    {200: [*JSON, MEDIA_TYPE]}, *ADMIN_ERRORS, NoDrafter, NotAcceptable
)
UPLOAD_RESPONSES = declare_responses(
    {202: JSON}, *ADMIN_ERRORS, *UPLOAD_ERRORS, *FILE_ERRORS, NoDrafter
)


@router.get("", responses=GET_RESPONSES)
@requires_role("admin")
async def drafter(request: Request, server: ReadyServer) -> Response:
    if not accepts_file(request.headers.get("accept")):
        return json_response(server.drafters.answer())
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
async def upload(version: str, server: ReadyServer, file: UploadedFile) -> Response:
    answer = await server.drafters.upload(label(version), file.chunks, digest=file.digest)
    return json_response(answer, 202)


async def _chunks(content: BinaryIO) -> AsyncIterator[bytes]:
    with content:
        while chunk := await asyncio.to_thread(content.read, WRITE_BYTES):
            yield chunk
