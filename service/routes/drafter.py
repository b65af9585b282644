"""/v1/drafter: ask about it, take it home, bring one that was trained elsewhere."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import BinaryIO

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from service.auth.access import needs
from service.http.bodies import bounded
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
from service.http.preferences import wants_file
from service.http.responses import JSON, OF_UPLOAD, WHEN_READY, WITH_KEY, answers
from service.routes.dependencies import ReadyServer
from service.weights.checkpoint_store import WRITE_BYTES

router = APIRouter(prefix="/v1/drafter")

FILE = "application/octet-stream"
VERSION_HEADER = "Coppice-Drafter-Version"
KNOWN = answers({200: [*JSON, FILE]}, *WITH_KEY, *WHEN_READY, NoDrafter, NotAcceptable)
OFFERED = answers(
    {202: JSON},
    *(*WITH_KEY, *WHEN_READY, *OF_UPLOAD, InvalidRequest, NoDrafter, VersionConflict),
    *(WeightsRefused, DigestMismatch, InsufficientStorage),
)


@router.get("", responses=KNOWN)
@needs("admin")
async def drafter(request: Request, server: ReadyServer) -> Response:
    if not wants_file(request.headers.get("accept")):
        answer = server.drafters.answer()
        return Response(answer.model_dump_json(), media_type="application/json")
    version, path = server.drafters.serving()
    # Before another takes its place: open it stays what it is, whatever becomes of its name.
    content = path.open("rb")
    num_bytes = os.fstat(content.fileno()).st_size
    return StreamingResponse(
        _chunks(content),
        media_type=FILE,
        headers={"Content-Length": str(num_bytes), VERSION_HEADER: version},
    )


@router.put("/{version}", responses=OFFERED)
@needs("admin")
async def offer(version: str, request: Request, server: ReadyServer) -> Response:
    answer = await server.drafters.offer(
        label(version),
        bounded(request, limit=server.settings.weights.max_upload_bytes),
        digest=request.headers.get("content-digest"),
    )
    return Response(answer.model_dump_json(), status_code=202, media_type="application/json")


async def _chunks(content: BinaryIO) -> AsyncIterator[bytes]:
    with content:
        while chunk := await asyncio.to_thread(content.read, WRITE_BYTES):
            yield chunk
